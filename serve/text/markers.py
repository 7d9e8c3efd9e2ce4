"""Finding marker strings in text that arrives in pieces of any size."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable


class MarkerSet:
    """A fixed set of non-empty strings to find: the leftmost first, and the longest of those that start there."""

    def __init__(self, markers: tuple[str, ...]):
        self._longest_first = sorted(markers, key=len, reverse=True)
        self._first_characters = frozenset(marker[0] for marker in markers)

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._longest_first)) or r"(?!)")

    def held(self, text: str) -> int:
        """How many characters at the end of `text` could be the beginning of a marker."""
        longest = len(self._longest_first[0]) if self._longest_first else 1
        for start in range(max(len(text) - longest + 1, 0), len(text)):
            if text[start] in self._first_characters and self._begins_marker(text[start:]):
                return len(text) - start
        return 0

    def _begins_marker(self, text: str) -> bool:
        return any(len(marker) > len(text) and marker.startswith(text) for marker in self._longest_first)

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


def scan(
    text: str,
    markers: Callable[[], MarkerSet],
    on_text: Callable[[str], None],
    on_marker: Callable[[str], None],
    final: bool,
) -> str:
    """Hands `text` over in order, plain parts and markers, up to what may be the beginning of a marker.

    Args:
        markers: those looked for now; asked again after each one, which may have changed them.
        final: no more text follows, so that nothing is held back.

    Returns:
        The end of `text` that was not handed over.
    """
    start = 0
    while True:
        end, marker = markers().search(text, start, final)
        if end > start:
            on_text(text[start:end])
        if marker is None:
            return text[end:]
        start = end + len(marker)
        on_marker(marker)
