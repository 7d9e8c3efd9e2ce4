"""Stop strings over tokens: when to stop, and which tokens the client gets."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Token ids in, the text they complete out: `serve.text.detokenize.IncrementalDetokenizer`."""

    def push(self, token_ids: Sequence[int], /) -> str: ...


class Matcher(Protocol):
    """Text in, the text before any stop string out: `serve.text.stop.StopStrings`."""

    matched: str | None

    def push(self, text: str, /) -> str: ...


class TokenStops:
    """Watches the text of one sequence for stop strings, and releases tokens once no stop string can begin in them.

    Only token ids go to the client, so a stop string is cut off at a token boundary:

    * it begins where a token begins: the tokens from there on are dropped, or kept with `include_stop`;
    * it begins inside a token: all tokens up to the end of the stop string are kept, because the text before it
      would be lost otherwise. The client is told the string, and cuts the text.

    Args:
        detokenizer: of this sequence alone.
        matcher: of this sequence alone; returns the text before the stop string, without it.
        include_stop: keep the stop string.
        min_tokens: text of this many first tokens is not searched.
    """

    def __init__(self, detokenizer: Detokenizer, matcher: Matcher, *, include_stop: bool, min_tokens: int):
        self._detokenizer, self._matcher = detokenizer, matcher
        self._include_stop, self._min_tokens = include_stop, min_tokens
        self._seen = 0  # tokens pushed
        self._fed = 0  # characters given to the matcher
        self._safe = 0  # characters the matcher has let through
        self._kept = (0, 0)  # tokens released, and the characters they end at
        self._held: collections.deque[tuple[int, int]] = collections.deque()  # likewise, not released yet

    def push(self, token_ids: Sequence[int]) -> tuple[int, str | None]:
        """Takes the next tokens; returns how many tokens since the start may go out, and the stop string if found.

        Tokens after the one that completes the stop string are not looked at.
        """
        for token_id in token_ids:
            self._seen += 1
            text = self._detokenizer.push([token_id])
            if self._seen <= self._min_tokens:
                self._kept = (self._seen, 0)
                continue
            if not text:  # an incomplete character, or a special token: goes with the token that follows
                continue
            self._fed += len(text)
            self._held.append((self._seen, self._fed))
            self._safe += len(self._matcher.push(text))
            while self._held and self._held[0][1] <= self._safe:
                self._kept = self._held.popleft()
            if self._matcher.matched is not None:
                begins_at_token = self._kept[1] == self._safe
                kept = self._kept[0] if begins_at_token and not self._include_stop else self._seen
                return kept, self._matcher.matched
        return self._kept[0], None
