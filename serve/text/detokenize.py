"""Token ids to text while they arrive, never showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from serve.text.tokenizer import Tokenizer

# A token id with the text that became certain with it; None where no single token can be named.
Piece = tuple[int | None, str]


class IncrementalDetokenizer:
    """Turns a growing list of token ids into text.

    The texts returned, joined, equal `Tokenizer.decode` of all ids (with the same tokens skipped). Each token costs the
    same, however long the answer: tokens are turned into bytes one by one, and only the bytes of an unfinished
    character wait.

    Args:
        tokenizer: whose ids these are.
        skip_special_tokens: leave the tokenizer's `skipped_ids` out of the text.
        keep: texts of control tokens to show all the same, such as the markers a parser reads.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, keep: Collection[str] = ()):
        kept = {tokenizer.special_token_ids[text] for text in keep if text in tokenizer.special_token_ids}
        self._tokenizer = tokenizer
        self._skipped = tokenizer.skipped_ids - kept if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = tokenizer.strips_leading_space
        self._last_id: int | None = None

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with these tokens."""
        return "".join(text for _, text in self.pieces(token_ids))

    def pieces(self, token_ids: Iterable[int]) -> list[Piece]:
        """Like `push`, token by token: (id, text), with the text of a control token never mixed with any other."""
        pieces: list[Piece] = []
        for token_id in token_ids:
            if token_id in self._skipped:
                continue
            if token_id in self._tokenizer.special_tokens:
                # Bytes before a control token can no longer be completed; they belong to the token that left them.
                pieces.append((self._last_id, self._decode(b"", final=True)))
            pieces.append((token_id, self._decode(self._tokenizer.token_bytes(token_id))))
            self._last_id = token_id
        return [piece for piece in pieces if piece[1]]

    def flush(self) -> str:
        """The rest: U+FFFD if the last character is incomplete, else nothing."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if text and self._strips_space:
            self._strips_space = False
            text = text.removeprefix(" ")
        return text
