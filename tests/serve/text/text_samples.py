"""Text to try tokenizers on, and vocabularies written as GGUF metadata."""

from __future__ import annotations

import random
from pathlib import Path

import gguf

# The word rule of GLM-4 and Llama 3, as their tokenizer.json spells it.
WORD_RULE = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SPECIAL = ["<|endoftext|>", "[MASK]", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TAGS += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
WORDS = [
    *"the quick brown fox doesn't jump over 12345 lazy dogs; it's 3.14 def f(x): return x+1".split(),
    *'<b>bold</b> a<b [1] {"k": 1} <|x|> <think'.split(),
    *"Grüße naïve café 한국어 문장 👩‍🚀 ñ 東京 こんにちは Привет مرحبا e\u0301 \ufb01 ½".split(),
    *("\t", "tabs\t", "\n\n", "\r\n"),
]
TEMPLATE = (Path(__file__).parent / "glm47.jinja").read_text("utf-8")


def mixed_lines(count: int, seed: int = 0, controls: bool = True) -> list[str]:
    """Lines of words, numbers, scripts, white space of many kinds and, where asked for, control tokens."""
    rng = random.Random(seed)
    parts = WORDS + ([*SPECIAL, *TAGS] if controls else [])
    spaces = ["", " ", " ", " ", "  ", "    ", "\n"]
    return ["".join(rng.choice(parts) + rng.choice(spaces) for _ in range(rng.randint(1, 12))) for _ in range(count)]


def write_gguf_vocabulary(file: Path, model: str, tokens, kinds, *, pre=None, merges=None, scores=None) -> Path:
    writer = gguf.GGUFWriter(file, "flint")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    writer.add_eos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eot_token_id(tokens.index("<|user|>"))
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def bpe_as_gguf(spec: dict, file: Path, pre: str) -> Path:
    """The same vocabulary as tokenizer.json, as GGUF metadata."""
    tokens = {i: text for text, i in spec["model"]["vocab"].items()}
    kinds = dict.fromkeys(tokens, 1)
    for token in spec["added_tokens"]:
        tokens[token["id"]] = token["content"]
        kinds[token["id"]] = 3 if token["special"] else 4
    order = range(len(tokens))
    merges = [" ".join(merge) for merge in spec["model"]["merges"]]
    return write_gguf_vocabulary(
        file, "gpt2", [tokens[i] for i in order], [kinds[i] for i in order], pre=pre, merges=merges
    )
