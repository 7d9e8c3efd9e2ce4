"""SentencePiece vocabularies, run by the `sentencepiece` library.

The library has no notion of text in which a user-defined symbol does not count. So symbols that are control tokens are
marked as unused in the model it is given, and are matched by `Tokenizer` where the caller says they count.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from serve.text.huggingface import merge_eos
from serve.text.tokenizer import ControlToken, Tokenizer, is_markup
from serve.text.tokenizer_settings import read_folder_settings

# Kinds of pieces, as numbered by SentencePiece and, alike, by GGUF's token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_SPACE = "\u2581"


def load(file: Path) -> SentencePieceTokenizer:
    """Loads a SentencePiece `.model` with the settings files of its folder."""
    model = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    model.ParseFromString(file.read_bytes())
    settings = read_folder_settings(file.parent)
    extra = [
        ControlToken(i, token["content"], token.get("special", False))
        for i, token in settings.added_tokens.items()
        if i >= len(model.pieces)
    ]
    tokenizer = SentencePieceTokenizer(
        model, extra, chat_template=settings.chat_template, template_variables=settings.template_variables
    )
    own = tokenizer.token_to_id(settings.template_variables.get("eos_token", model.trainer_spec.eos_piece))
    tokenizer.eos_token_ids = merge_eos(settings.generation.eos_token_ids, own)
    return tokenizer


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer given as a SentencePiece ModelProto.

    Args:
        model: the ModelProto; left unchanged.
        extra: control tokens beyond the model's own pieces.
        settings: passed to `Tokenizer`.
    """

    def __init__(self, model: Any, extra: Iterable[ControlToken] = (), **settings: Any):
        controls = [*extra]
        plain = type(model)()
        plain.CopyFrom(model)
        for i, piece in enumerate(plain.pieces):
            if piece.type in (CONTROL, UNKNOWN) or (piece.type == USER_DEFINED and is_markup(piece.piece)):
                controls.append(ControlToken(i, piece.piece, special=piece.type != USER_DEFINED))
            if piece.type == USER_DEFINED and is_markup(piece.piece):
                piece.type = UNUSED
        self._first = sentencepiece.SentencePieceProcessor(model_proto=plain.SerializeToString())
        self.strips_leading_space = plain.normalizer_spec.add_dummy_prefix
        # Only a text's very first word gets a space put in front.
        plain.normalizer_spec.add_dummy_prefix = False
        self._continued = sentencepiece.SentencePieceProcessor(model_proto=plain.SerializeToString())
        self._ids = {piece.piece: i for i, piece in enumerate(plain.pieces)}
        self._pieces = [(piece.piece, piece.type) for piece in plain.pieces]
        vocab_size = max([len(self._pieces), *(token.id + 1 for token in controls)])
        super().__init__(controls, vocab_size, **settings)

    def _encode_ordinary(self, text: str, first: bool) -> list[int]:
        return (self._first if first else self._continued).encode(text)

    def _ordinary_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _ordinary_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._pieces):
            return b""
        piece, kind = self._pieces[token_id]
        return bytes([int(piece[3:5], 16)]) if kind == BYTE else piece.replace(_SPACE, " ").encode()
