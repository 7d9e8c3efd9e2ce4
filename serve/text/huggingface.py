"""Tokenizers in the format of tokenizer.json, run by the `tokenizers` library."""

from __future__ import annotations

import itertools
import json
import operator
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from serve.text.tokenizer import ControlToken, Tokenizer, is_markup
from serve.text.tokenizer_settings import read_folder_settings, read_json

_SPACE = "\u2581"  # stands for a space in SentencePiece vocabularies
_LONG_TEXT = 4096  # characters; from here on other threads must get their turn
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load(file: Path) -> HuggingFaceTokenizer:
    """Loads tokenizer.json with the settings files of its folder."""
    settings = read_folder_settings(file.parent)
    spec = read_json(file)
    tokenizer = HuggingFaceTokenizer(
        spec, chat_template=settings.chat_template, template_variables=settings.template_variables
    )
    own = tokenizer.token_to_id(settings.template_variables.get("eos_token", ""))
    tokenizer.eos_token_ids = merge_eos(settings.generation.eos_token_ids, own)
    return tokenizer


def merge_eos(listed: Sequence[int], *own: int | None) -> tuple[int, ...]:
    """The ids of generation_config.json and the tokenizer's own, without repetition."""
    return tuple(dict.fromkeys([*listed, *(i for i in own if i is not None)]))


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer given as the parsed content of tokenizer.json.

    The library matches control tokens in any text it is given. So it is handed a copy of the vocabulary in which every
    control token has a name nobody can guess, and the names are matched here, where the caller says they count.

    Args:
        spec: content of tokenizer.json.
        settings: passed to `Tokenizer`. `prefix_ids` come from the post-processor if not given.

    Raises:
        ValueError: the decoder is of a kind whose tokens cannot be turned into bytes one by one, or an added token
            does not get the id the file states.
    """

    def __init__(self, spec: Mapping[str, Any], **settings: Any):
        spec = dict(spec) | {"added_tokens": spec.get("added_tokens") or []}
        controls = [_control_token(token) for token in spec["added_tokens"] if _is_control(token)]
        decoders = _flatten(spec.get("decoder"), "decoders")
        self._kind = _vocabulary_kind(decoders)
        self.strips_leading_space = _strips_leading_space(decoders)

        plain = _rename_controls(spec, {token.text: secrets.token_hex(16) for token in controls})
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
        for token in plain["added_tokens"]:
            if self._plain.token_to_id(token["content"]) != token["id"]:
                raise ValueError(f"tokenizer.json gives added token number {token['id']} an id that is not free")
        continued = _without_first_space(plain)
        self._continued = tokenizers.Tokenizer.from_str(json.dumps(continued)) if continued else self._plain
        self._bytes: dict[int, bytes] = {}

        vocab_size = max(self._plain.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        settings.setdefault("prefix_ids", self._template_prefix())
        super().__init__(controls, vocab_size, **settings)

    def _template_prefix(self) -> list[int]:
        """The ids that the post-processor puts in front of a text."""
        encoded = self._plain.encode("a", add_special_tokens=True)
        pairs = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        return [token_id for token_id, _ in itertools.takewhile(operator.itemgetter(1), pairs)]

    def _encode_ordinary(self, text: str, first: bool) -> list[int]:
        library = self._plain if first else self._continued
        if len(text) < _LONG_TEXT:
            return library.encode(text, add_special_tokens=False).ids
        # `encode` holds Python's lock throughout, for seconds on megabytes; a batch is encoded without it.
        return library.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _ordinary_id(self, token: str) -> int | None:
        return self._plain.token_to_id(token)

    def _ordinary_bytes(self, token_id: int) -> bytes:
        if token_id not in self._bytes:
            token = self._plain.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            self._bytes[token_id] = b"" if token is None else self._token_to_bytes(token)
        return self._bytes[token_id]

    def _token_to_bytes(self, token: str) -> bytes:
        if self._kind == "byte-level":
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token keeps its plain spelling
                return token.encode()
        byte = _BYTE_PIECE.fullmatch(token) if self._kind == "byte-fallback" else None
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def character_of_byte() -> list[str]:
    """The printable character that byte-level vocabularies write for each byte.

    Visible Latin-1 characters stand for themselves; the other bytes take the characters from U+0100 on, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


_BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(character_of_byte())}


def _is_control(token: Mapping[str, Any]) -> bool:
    return token.get("special", False) or is_markup(token["content"])


def _control_token(token: Mapping[str, Any]) -> ControlToken:
    flags = {name: token.get(name, False) for name in ("special", "lstrip", "rstrip", "single_word")}
    return ControlToken(token["id"], token["content"], **flags)


def _flatten(part: Mapping[str, Any] | None, members: str) -> list[Mapping[str, Any]]:
    """The parts of a possibly nested Sequence, in order."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [leaf for member in part[members] for leaf in _flatten(member, members)]
    return [part]


def _vocabulary_kind(decoders: list[Mapping[str, Any]]) -> str:
    types = [decoder["type"] for decoder in decoders]
    if "ByteLevel" in types:
        return "byte-level"
    if "ByteFallback" in types:
        return "byte-fallback"
    if "Metaspace" in types:
        return "spaces"
    named = ", ".join(types) or "none"
    raise ValueError(
        f"the decoder of tokenizer.json ({named}) is not supported: use ByteLevel, ByteFallback or Metaspace"
    )


def _strips_leading_space(decoders: list[Mapping[str, Any]]) -> bool:
    for decoder in decoders:
        if decoder["type"] == "Strip" and decoder["content"] == " " and decoder["start"] > 0:
            return True
        if decoder["type"] == "Metaspace" and decoder.get("prepend_scheme", "always") != "never":
            return True
    return False


def _rename_controls(spec: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A copy of `spec` with control tokens renamed wherever text could produce them, and no truncation or padding."""
    model = dict(spec["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): i for text, i in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: pieces with scores, in the order of their ids
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if "merges" in model:
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [merge for merge in merges if names.keys().isdisjoint([*merge, "".join(merge)])]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [token | {"content": names.get(token["content"], token["content"])} for token in spec["added_tokens"]]
    return dict(spec) | {"model": model, "added_tokens": added, "truncation": None, "padding": None}


def _without_first_space(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """`spec` for text that continues a prompt, where it treats the first word of a text differently; else None."""
    parts = _flatten(spec.get("pre_tokenizer"), "pretokenizers")
    if not any(part.get("prepend_scheme") == "first" for part in parts):
        return None
    renamed = [dict(part) | ({"prepend_scheme": "never"} if part["type"] == "Metaspace" else {}) for part in parts]
    return dict(spec) | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": renamed}}
