"""The metadata of a GGUF file, and nothing else of it.

A vocabulary of 150,000 tokens and its merges are 300,000 strings; they are read here one after the other from the
mapped file, in less than a second.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

# Type id -> how `struct` calls it.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """Little-endian values, one after the other."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self._at = 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (length,) = self.unpack("<Q")
        text = self._data[self._at : self._at + length]
        if len(text) < length:
            raise ValueError("the file ends in the middle of a string")
        self._at += length
        return text.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.unpack("<" + _SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"metadata of unknown type {kind}")
        element, count = self.unpack("<IQ")
        if element in _SCALARS:
            return list(self.unpack(f"<{count}{_SCALARS[element]}"))
        return [self.value(element) for _ in range(count)]


def read_metadata(file: str | Path) -> dict[str, Any]:
    """All metadata of a GGUF file: key -> number, string or list.

    Raises:
        ValueError: the file is no little-endian GGUF of version 2 or 3, or is damaged.
    """
    with Path(file).open("rb") as opened:
        try:
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                cursor = _Cursor(data)
                magic, version, _, num_keys = cursor.unpack("<4sIQQ")
                if magic != b"GGUF" or version not in (2, 3):
                    raise ValueError(f"it begins with {magic!r} and version {version}, not GGUF 2 or 3")
                return {cursor.string(): cursor.value(*cursor.unpack("<I")) for _ in range(num_keys)}
        except (ValueError, struct.error, OverflowError, MemoryError, RecursionError) as error:
            raise ValueError(f"the metadata of {file} cannot be read: {error}") from error
