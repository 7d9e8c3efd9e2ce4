"""Which pages of the pools are free."""

from __future__ import annotations


class PagePool:
    """A stack of free page numbers 0 .. num_pages - 1. Not thread-safe: the engine thread owns it."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def take(self, count: int) -> list[int]:
        """Takes `count` pages; check `num_free` first.

        Raises:
            ValueError: fewer are free, which is a fault of the caller.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Returns pages that `take` handed out.

        Raises:
            ValueError: a page is not in use (given back twice, or out of range).
        """
        if strange := [page for page in pages if page not in self._used]:
            raise ValueError(f"pages {strange} are not in use")
        self._used.difference_update(pages)
        self._free.extend(pages)
