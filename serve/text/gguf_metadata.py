"""The tokenizer in the metadata of a GGUF file.

GGUF keeps a vocabulary and its merges, but names the rule that cuts text into words (`tokenizer.ggml.pre`) instead of
holding it; the rules are here. A `tokenizer.json` inside the file (`tokenizer.huggingface.json`) is used as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from modeling.loading.gguf import read_metadata
from serve.text.huggingface import HuggingFaceTokenizer, merge_eos
from serve.text.spm import CONTROL, UNKNOWN, USER_DEFINED, SentencePieceTokenizer
from serve.text.tokenizer import Tokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str, letter: str = r"\p{L}", not_symbol: str = r"\s\p{L}\p{N}") -> str:
    """The family of rules that began with GPT-4: they differ in how many digits and which letters make a word."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{letter}+"
        rf"|{digits}"
        rf"| ?[^{not_symbol}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# Name -> regular expressions, applied one after the other, each isolating its matches.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_SINGLE_DIGITS = (r"\p{N}", _GPT2)
_LLAMA3 = (_cl100k(r"\p{N}{1,3}"),)
_QWEN2 = (_cl100k(r"\p{N}"),)
_QWEN35 = (_cl100k(r"\p{N}", r"[\p{L}\p{M}]", r"\s\p{L}\p{M}\p{N}"),)
_WORD_RULES: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt2", "gpt-2", "mpt", "olmo", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2),
    "qwen35": _QWEN35,
}
# A word that is in the vocabulary becomes that token, whatever the merges say.
_IGNORES_MERGES = {"llama3", "llama-v3", "llama-bpe"}
# Rules published together with Unicode composition (NFC) of the text.
_COMPOSES = {"qwen2", "qwen35", "deepseek-r1-qwen"}


def load(file: Path) -> Tokenizer:
    """Loads the tokenizer of a GGUF file; of a split model, of its first part.

    Raises:
        ValueError: the file carries no tokenizer, or one of a kind or with a word rule that is not supported.
    """
    return from_metadata(read_metadata(file))


def from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds a tokenizer from `tokenizer.*` metadata; raises ValueError as `load` does."""
    kind = metadata.get("tokenizer.ggml.model")
    settings = _settings(metadata)
    if "tokenizer.huggingface.json" in metadata:
        settings.pop("prefix_ids")
        return HuggingFaceTokenizer(json.loads(metadata["tokenizer.huggingface.json"]), **settings)
    if kind == "gpt2":
        return HuggingFaceTokenizer(_bpe_spec(metadata), **settings)
    if kind in ("llama", "t5"):
        return SentencePieceTokenizer(_sentencepiece_model(metadata, kind), **settings)
    raise _unsupported(kind)


def _unsupported(kind: str | None) -> ValueError:
    if kind is None:
        return ValueError("the GGUF file carries no tokenizer: put tokenizer.json beside the model and name its folder")
    return ValueError(f"tokenizer.ggml.model {kind!r} is not supported: use gpt2 or llama, or a tokenizer.json")


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The tokenizer as a checkpoint's folder would hold it: file name -> content; raises ValueError as `load` does."""
    settings, kind = _settings(metadata), metadata.get("tokenizer.ggml.model")
    if "tokenizer.huggingface.json" in metadata:
        files = {"tokenizer.json": metadata["tokenizer.huggingface.json"].encode()}
    elif kind == "gpt2":
        files = {"tokenizer.json": _json(_bpe_spec(metadata))}
    elif kind in ("llama", "t5"):
        files = {"tokenizer.model": _sentencepiece_model(metadata, kind).SerializeToString(deterministic=True)}
    else:
        raise _unsupported(kind)
    class_name = {"tokenizer_class": "PreTrainedTokenizerFast"} if "tokenizer.json" in files else {}
    files["tokenizer_config.json"] = _json(class_name | settings["template_variables"])
    if settings["chat_template"] is not None:
        files["chat_template.jinja"] = settings["chat_template"].encode()
    return files


def _settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    # Llama vocabularies start a prompt with BOS unless told otherwise; the others do not.
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama")
    variables = {
        f"{gguf_name}_token": metadata.get(f"tokenizer.ggml.{key}_token_id")
        for gguf_name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return {
        "eos_token_ids": merge_eos([], ids["eos"], ids["eot"], ids["eom"]),
        "prefix_ids": [ids["bos"]] if adds_bos and ids["bos"] is not None else [],
        "chat_template": metadata.get("tokenizer.chat_template"),
        "template_variables": {name: tokens[i] for name, i in variables.items() if i is not None and i < len(tokens)},
    }


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _bpe_spec(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the tokenizer.json that the metadata stands for."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _WORD_RULES:
        known = ", ".join(sorted(_WORD_RULES))
        raise ValueError(
            f"tokenizer.ggml.pre {pre!r} is not known (known: {known}): put the model's tokenizer.json beside the "
            "GGUF file and name their folder"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    added = [
        {"id": i, "content": token, "special": kind != USER_DEFINED, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": metadata.get("tokenizer.ggml.add_space_prefix", False)}
    byte_level |= {"trim_offsets": False, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}
        for rule in _WORD_RULES[pre]
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre in _COMPOSES else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata.get("tokenizer.ggml.merges", [])],
            "ignore_merges": pre in _IGNORES_MERGES,
        },
    }


def _sentencepiece_model(metadata: Mapping[str, Any], kind: str) -> Any:
    """The ModelProto that the metadata was taken from: llama is SentencePiece's BPE, t5 its unigram model."""
    model = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata["tokenizer.ggml.scores"]
    for token, score, piece_kind in zip(tokens, scores, metadata["tokenizer.ggml.token_type"], strict=True):
        model.pieces.add(piece=token, score=score, type=piece_kind)
    model.trainer_spec.model_type = 2 if kind == "llama" else 1
    model.trainer_spec.byte_fallback = any(token == "<0x00>" for token in tokens)
    normalizer = model.normalizer_spec
    normalizer.add_dummy_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    normalizer.remove_extra_whitespaces = metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)
    normalizer.escape_whitespaces = True
    normalizer.precompiled_charsmap = bytes(metadata.get("tokenizer.ggml.precompiled_charsmap", []))
    return model
