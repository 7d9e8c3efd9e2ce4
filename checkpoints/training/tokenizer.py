"""The tiny model's tokenizer: byte-level BPE over the corpus, with GLM's markers as added tokens.

Words, single digits and runs of spaces are separate pieces, so that a word has the same tokens wherever it stands and
copying one is copying tokens.
"""

import json
from functools import cache
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

VOCAB_SIZE = 1024
CHECKPOINT = Path(__file__).parent.parent / "flint-tiny"

# As in GLM's tokenizer, the markers of turns are special tokens and the think and tool tags are ordinary added tokens.
SPECIAL = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<tool_response>", "</tool_response>",
)  # fmt: skip
END = ("<|endoftext|>", "<|user|>", "<|observation|>")


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Trains the BPE merges on rendered conversations."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|[\r\n]+|[^\S\r\n]+|[^\s\p{L}\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    for marker in (*SPECIAL, *TAGS):
        texts = [text.replace(marker, "\n") for text in texts]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in TAGS])
    return tokenizer


@cache
def load_tokenizer() -> Tokenizer:
    """The committed tokenizer."""
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def write_tokenizer(folder: Path, seed: int = 1, conversations: int = 20000) -> None:
    """Trains the tokenizer on the corpus and writes its files."""
    from checkpoints.training.corpus import stream
    from checkpoints.training.render import prompt_text

    texts = [prompt_text(c) + c.completion() for c in islice(stream(seed), conversations)]
    train_tokenizer(texts).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "extra_special_tokens": [text for text in SPECIAL if text != "<|endoftext|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    write_tokenizer(CHECKPOINT)
