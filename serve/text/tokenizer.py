"""Text to token ids and back, for every form a checkpoint keeps its tokenizer in.

A tokenizer has two vocabularies. Ordinary text is cut into ordinary tokens; control tokens (role markers, think and
tool tags, end of text) are written by the chat template and by the model, never by a user. `Tokenizer` keeps the two
apart: `encode` treats control-token strings as plain characters unless told otherwise, and `encode_pieces` takes text
and control ids side by side, so that a chat prompt can hold both `<|user|>` the marker and "<|user|>" the nine
characters somebody typed.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class ControlToken:
    """One control token.

    Attributes:
        id: its token id.
        text: what it decodes to.
        special: left out of the text when special tokens are skipped. Tags such as `<think>` usually are not special,
            though user text must not produce them either.
        lstrip, rstrip: swallows the white space before, after it.
        single_word: matched only where no word character touches it.
    """

    id: int
    text: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    def pattern(self) -> str:
        core = re.escape(self.text)
        if self.single_word:
            core = rf"(?<!\w){core}(?!\w)"
        return (r"\s*" if self.lstrip else "") + core + (r"\s*" if self.rstrip else "")


def is_markup(text: str) -> bool:
    """Whether a token that a checkpoint adds without calling it special is a control token all the same.

    Checkpoints add plain words and runs of spaces to a vocabulary too, and those belong to ordinary text; what is
    bracketed, as `<think>` or `[gMASK]`, is a marker.
    """
    return len(text) > 2 and text[0] + text[-1] in ("<>", "[]")


class Tokenizer(abc.ABC):
    """Text to token ids and back. Make one with `serve.text.load.load_tokenizer`.

    Attributes:
        vocab_size: one more than the highest id. The model's own vocabulary may be padded beyond it.
        special_tokens: id -> text of every control token, in the order of their ids.
        special_token_ids: the same, text -> id.
        skipped_ids: the control tokens left out by `skip_special_tokens`.
        eos_token_ids: every id that ends an answer, from generation_config.json and the tokenizer's own settings.
        prefix_ids: what belongs in front of a prompt that is not a chat (a chat template writes its own).
        chat_template: the checkpoint's Jinja source, or None.
        template_variables: bos_token, eos_token and the like, which chat templates refer to.
        source: the file it was loaded from; None for one made otherwise.
    """

    # Whether the vocabulary marks a text's first word with a space that is not part of the text.
    strips_leading_space = False

    def __init__(
        self,
        controls: Iterable[ControlToken],
        vocab_size: int,
        *,
        eos_token_ids: Iterable[int] = (),
        prefix_ids: Sequence[int] = (),
        chat_template: str | None = None,
        template_variables: Mapping[str, str] | None = None,
    ):
        controls = sorted(controls, key=lambda token: token.id)
        self.vocab_size = vocab_size
        self.special_tokens = {token.id: token.text for token in controls}
        self.special_token_ids = {token.text: token.id for token in controls}
        self.skipped_ids = frozenset(token.id for token in controls if token.special)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.prefix_ids = tuple(prefix_ids)
        self.chat_template = chat_template
        self.template_variables = dict(template_variables or {})
        self.source: Path | None = None
        # Longest first: where one marker begins with another, the longer one is meant.
        by_length = sorted(controls, key=lambda token: -len(token.text))
        self._control_pattern = re.compile("|".join(token.pattern() for token in by_length) or r"(?!)")

    @abc.abstractmethod
    def _encode_ordinary(self, text: str, first: bool) -> list[int]:
        """Ids of non-empty text without control tokens; `first` if nothing comes before it."""

    @abc.abstractmethod
    def _ordinary_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes an ordinary token stands for; empty for an id outside the vocabulary."""

    @abc.abstractmethod
    def _ordinary_id(self, token: str) -> int | None:
        """Id of an ordinary token, spelled as in the vocabulary."""

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of `text`, with nothing added in front or behind.

        Args:
            text: any string.
            parse_special: read control-token strings as control tokens. Only for text no user had a hand in.
        """
        return self.encode_pieces(self.split_special(text) if parse_special else [text])

    def encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        """Token ids of text (strings, always ordinary) and control tokens (ids) in turn."""
        ids: list[int] = []
        for position, piece in enumerate(pieces):
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                ids += self._encode_ordinary(piece, first=position == 0)
        return ids

    def split_special(self, text: str) -> list[str | int]:
        """Cuts `text` at its control-token strings: ordinary text as strings, control tokens as ids."""
        pieces: list[str | int] = []
        end = 0
        for match in self._control_pattern.finditer(text):
            if match.start() > end:
                pieces.append(text[end : match.start()])
            found = match.group()
            pieces.append(self.special_token_ids[found if found in self.special_token_ids else found.strip()])
            end = match.end()
        if end < len(text):
            pieces.append(text[end:])
        return pieces

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary become nothing."""
        skipped = self.skipped_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token; a character may be spread over several tokens."""
        control = self.special_tokens.get(token_id)
        return self._ordinary_bytes(token_id) if control is None else control.encode()

    @functools.cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token, at least 1. Slow the first time: it goes through the whole vocabulary."""
        return max((len(self.token_bytes(i)) for i in range(self.vocab_size)), default=0) or 1

    def token_to_id(self, token: str) -> int | None:
        """Id of a token spelled as in the vocabulary, control tokens included; None if there is no such token."""
        control = self.special_token_ids.get(token)
        return self._ordinary_id(token) if control is None else control
