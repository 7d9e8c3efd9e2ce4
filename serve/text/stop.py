"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from serve.request import InvalidRequest
from serve.text.detokenize import Piece
from serve.text.markers import MarkerSet


class StopStrings:
    """Cuts a stream of text at the first stop string, and shows nothing of the stop string before it is sure.

    The first stop string is the one completed first; of several completed by the same character, the longest. So the
    result depends on the text alone, not on how it is cut into pieces. Text that may be the beginning of a stop string
    is held back until it cannot be; without stop strings nothing is.

    Whoever needs to know which token completed a stop string (to report one log-probability a token, say) pushes the
    tokens one at a time and looks at `matched` after each.

    Args:
        stop: the stop strings.
        include_stop: end the text with the stop string instead of before it.
        atomic_ids: token ids whose text is shown whole or not at all: control tokens. A cut in the middle of one
            leaves nothing of it.

    Attributes:
        matched: the stop string found, or None.

    Raises:
        InvalidRequest: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str] = (), *, include_stop: bool = False, atomic_ids: Container[int] = ()):
        if not all(stop):
            raise InvalidRequest("a stop string must not be empty: leave it out of `stop`")
        self.matched: str | None = None
        self._stop = sorted(stop, key=len, reverse=True)
        self._markers = MarkerSet(tuple(stop))
        self._include_stop = include_stop
        self._atomic_ids = atomic_ids
        self._waiting: list[Piece] = []

    def push(self, text: str) -> str:
        """The text that may be shown. Empty once a stop string has been found."""
        return "".join(shown for _, shown in self.push_pieces([(None, text)]))

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        return "".join(shown for _, shown in self.flush_pieces())

    def push_pieces(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Like `push` for the pieces of an `IncrementalDetokenizer`, which keep their token ids."""
        shown: list[Piece] = []
        for piece in pieces:
            if self.matched is None:
                self._waiting.append(piece)
                shown += self._release()
        return shown

    def flush_pieces(self) -> list[Piece]:
        """Like `flush`, as pieces."""
        rest, self._waiting = self._waiting, []
        return rest

    def _release(self) -> list[Piece]:
        text = "".join(piece_text for _, piece_text in self._waiting)
        ends = [(text.find(stop) + len(stop), stop) for stop in self._stop if stop in text]
        if not ends:
            return self._take(len(text) - self._markers.held(text))
        end, self.matched = min(ends, key=lambda found: found[0])  # min keeps the first, that is the longest, of equals
        shown = self._take(end if self._include_stop else end - len(self.matched))
        self._waiting = []
        return shown

    def _take(self, length: int) -> list[Piece]:
        """Takes the first `length` characters off what waits, less an atomic piece they do not cover whole."""
        taken: list[Piece] = []
        while self._waiting and length > 0:
            token_id, text = self._waiting[0]
            if length < len(text) and token_id is not None and token_id in self._atomic_ids:
                break
            taken.append((token_id, text[:length]))
            if length < len(text):
                self._waiting[0] = (token_id, text[length:])
            else:
                del self._waiting[0]
            length -= len(text)
        return taken
