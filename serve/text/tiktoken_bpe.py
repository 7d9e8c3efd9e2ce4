"""Tokenizers in tiktoken's form: a file of byte strings with their ranks, run by the `tiktoken` library.

Such a file names neither its word rule nor its control tokens. Both are those of Inkling, the one model here that
ships one: o200k's words, and 60 control tokens behind the last rank (spec 8.1).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiktoken

from serve.text.huggingface import merge_eos
from serve.text.inkling_tokens import END_TURN, control_names
from serve.text.tokenizer import ControlToken, Tokenizer
from serve.text.tokenizer_settings import read_folder_settings

_FOLDER = "tiktoken"  # inside the checkpoint's own, where the settings are
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORDS = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def is_tiktoken(file: Path) -> bool:
    """Whether a `.model` file is of this form, by its first line; the other form is SentencePiece's."""
    with file.open("rb") as opened:
        return _LINE.match(opened.readline(4096)) is not None


def load(file: Path) -> TiktokenTokenizer:
    """Loads a file of ranks with the settings files of the checkpoint's folder.

    Raises:
        ValueError: a line is no byte string with its rank, or a single byte has no rank.
    """
    settings = read_folder_settings(file.parent.parent if file.parent.name == _FOLDER else file.parent)
    tokenizer = TiktokenTokenizer(
        _read_ranks(file), chat_template=settings.chat_template, template_variables=settings.template_variables
    )
    own = tokenizer.token_to_id(settings.template_variables.get("eos_token", END_TURN))
    tokenizer.eos_token_ids = merge_eos(settings.generation.eos_token_ids, own)
    return tokenizer


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} is not a token in base64 and its rank") from None
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"it has no rank for byte {missing[0]:#04x}, and so cannot encode every text")
    return ranks


class TiktokenTokenizer(Tokenizer):
    """A tokenizer given as byte strings and ranks; a rank is the token's id.

    Args:
        ranks: byte string -> rank. All 256 single bytes are among them.
        settings: passed to `Tokenizer`.
    """

    def __init__(self, ranks: Mapping[bytes, int], **settings: Any):
        first_control = max(ranks.values()) + 1
        controls = [ControlToken(i, name) for i, name in enumerate(control_names(), first_control)]
        self._ranks = ranks
        self._bytes = {rank: token for token, rank in ranks.items()}
        self._library = tiktoken.Encoding("ranks", pat_str=WORDS, mergeable_ranks=dict(ranks), special_tokens={})
        super().__init__(controls, first_control + len(controls), **settings)

    def _encode_ordinary(self, text: str, first: bool) -> list[int]:
        return self._library.encode_ordinary(text)

    def _ordinary_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def _ordinary_id(self, token: str) -> int | None:
        return self._ranks.get(token.encode())
