"""Finding marker strings in text that arrives in pieces of any size."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable


class MarkerSet:
    """A fixed set of non-empty strings to find: the leftmost first, and the longest of those that start there."""

    def __init__(self, markers: tuple[str, ...]):
        longest_first = sorted(markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {marker[:n] for marker in markers for n in range(1, len(marker))}
        self._longest_beginning = max((len(beginning) for beginning in self._beginnings), default=0)

    def held(self, text: str) -> int:
        """How many characters at the end of `text` could be the beginning of a marker."""
        for n in range(min(self._longest_beginning, len(text)), 0, -1):
            if text[-n:] in self._beginnings:
                return n
        return 0

    def replace(self, text: str, replacement: Callable[[str], str]) -> str:
        """`text` with `replacement(marker)` in the place of every marker."""
        return self._pattern.sub(lambda found: replacement(found[0]), text)

    def search(self, text: str, start: int = 0, final: bool = False) -> tuple[int, str | None]:
        """Looks for the next marker at or after `start`.

        Returns:
            (end, marker): text[start:end] holds no marker, and `marker` follows it. With None for the marker,
            text[end:] must wait for more text; it is empty if `final`, that is, if no more will come.
        """
        match = self._pattern.search(text, start)
        found = match.start() if match else len(text)
        if not final:
            # What is held may yet become a longer marker than the one found, or an earlier one.
            undecided = max(start, len(text) - self.held(text))
            if undecided < found or (match and undecided == found):
                return undecided, None
        return found, match.group() if match else None


@functools.cache
def marker_set(*markers: str) -> MarkerSet:
    """The `MarkerSet` of these strings, made once."""
    return MarkerSet(markers)
