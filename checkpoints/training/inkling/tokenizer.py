"""The tiny Inkling's tokenizer: byte-level BPE over its corpus, as the tiny Flint's, with Inkling's control tokens.

    python -m checkpoints.training.inkling.tokenizer

The control tokens have Inkling's names; their ids are the first ones, in the published order.
"""

import json
from functools import cache
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from serve.text import inkling_tokens as names

CHECKPOINT = Path(__file__).parents[2] / "inkling-tiny"
VOCAB_SIZE, KEPT_VOCAB_SIZE = 1088, 1024  # rows of the embedding, and those that are tokens
# In the published order: the placeholders lie among the others there.
_BY_ID = names.NAMES | {200053: names.PLACEHOLDERS["audio"], 200054: names.PLACEHOLDERS["image"]}
SPECIAL = tuple(_BY_ID[number] for number in sorted(_BY_ID))


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Trains the BPE merges on texts without control tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|[\r\n]+|[^\S\r\n]+|[^\s\p{L}\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = BpeTrainer(
        vocab_size=KEPT_VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@cache
def load_tokenizer() -> Tokenizer:
    """The committed tokenizer."""
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def token_id(control: str) -> int:
    """The id of a control token."""
    return SPECIAL.index(control)


def write_tokenizer(folder: Path, seed: int = 1, conversations: int = 20000) -> None:
    """Trains the tokenizer on the corpus and writes it."""
    from checkpoints.training.inkling.corpus import stream
    from checkpoints.training.inkling.render import Marker, pieces

    texts = []
    for conversation in islice(stream(seed), conversations):
        texts += [piece for piece in pieces(conversation) if not isinstance(piece, Marker)]
    train_tokenizer(texts).save(str(folder / "tokenizer.json"))


def write_tokenizer_config(folder: Path) -> None:
    """Writes the settings beside the tokenizer."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": names.END_TURN,
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "extra_special_tokens": [text for text in SPECIAL if text not in (names.END_TURN, "<|endoftext|>")],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    CHECKPOINT.mkdir(exist_ok=True)
    write_tokenizer(CHECKPOINT)
