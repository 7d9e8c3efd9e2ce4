"""Stop strings in a stream of text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

from serve.request import InvalidRequest
from serve.text.markers import MarkerSet

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024  # of one stop string


class StopStrings:
    """Cuts a stream of text before the first stop string, and shows nothing of the stop string before it is sure.

    The first stop string is the one completed first; of several completed by the same character, the longest. So the
    result depends on the text alone, not on how it is cut into pieces. Text that may be the beginning of a stop string
    is held back until it cannot be; without stop strings nothing is.

    Whoever needs to know which token completed a stop string pushes the text of one token at a time and looks at
    `matched` after each; `serve.grpc.stops` does.

    Attributes:
        matched: the stop string found, or None.

    Raises:
        InvalidRequest: a stop string is empty or too long, or there are too many of them.
    """

    def __init__(self, stop: Sequence[str] = ()):
        if not all(stop):
            raise InvalidRequest("a stop string must not be empty: leave it out of `stop`")
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"there are {len(stop)} stop strings; a request may have {MAX_STOP_STRINGS}")
        if (longest := max(map(len, stop), default=0)) > MAX_STOP_CHARACTERS:
            message = f"a stop string has {longest} characters; it may have {MAX_STOP_CHARACTERS}"
            raise InvalidRequest(message)
        self.matched: str | None = None
        self._stop = sorted(stop, key=len, reverse=True)
        self._markers = MarkerSet(tuple(stop))
        self._waiting = ""

    def fresh(self) -> Self:
        """The same stop strings for another stream of text."""
        other = copy.copy(self)
        other.matched, other._waiting = None, ""
        return other

    def push(self, text: str) -> str:
        """The text that may be shown. Empty once a stop string has been found."""
        if self.matched is not None:
            return ""
        text = self._waiting + text
        ends = [(text.find(stop) + len(stop), stop) for stop in self._stop if stop in text]
        if ends:
            end, self.matched = min(ends, key=lambda found: found[0])  # the first, that is the longest, of equals
            self._waiting = ""
            return text[: end - len(self.matched)]
        shown = len(text) - self._markers.held(text)
        self._waiting = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        rest, self._waiting = self._waiting, ""
        return rest
