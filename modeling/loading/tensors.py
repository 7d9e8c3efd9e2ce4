"""A tensor in a file: what its header says, and reading its bytes without mapping the file.

Plain positional reads into the caller's buffer, not a memory map: pages of a map count as the process's own memory,
so that a loader using one seems to hold the model twice.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Self

import ml_dtypes
import numpy as np

from modeling.errors import CheckpointError

# Element types that leaves are read from; everything else is refused by name. Packed codes and block scales stay bytes.
NUMPY_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(np.uint8),
}
PLAIN = ("BF16", "F32")


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint file.

    Attributes:
        dtype: the file format's name of the type, for example "BF16" or "NVFP4".
        shape: outermost dimension first, in elements (also where elements are packed).
        path: the file. offset: where the data starts in it, in bytes. nbytes: the data's length.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A run of elements of a tensor on disk that fills a run of elements of a leaf, both in row-major order.

    Bytes on disk fill bytes of the leaf: it then counts as an array of bytes, also where it holds words.

    Attributes:
        tensor: name on disk. shape: what its shape must be.
        source, target: first element in the tensor and in the leaf. size: elements, by default the whole tensor.
    """

    tensor: str
    shape: tuple[int, ...]
    source: int = 0
    target: int = 0
    size: int = -1

    def __post_init__(self):
        if self.size < 0:
            object.__setattr__(self, "size", math.prod(self.shape))


@dataclasses.dataclass(frozen=True)
class OnDisk:
    """What a leaf is made of in a safetensors checkpoint.

    Attributes:
        pieces: fill all of the leaf.
        types: element types that they may have.
        row: 0 or 1 where the leaf is every other row of its one tensor, from this row on, and another leaf the rest.
        reciprocal: the leaf is one over what is on disk.
    """

    pieces: tuple[Piece, ...]
    types: tuple[str, ...] = PLAIN
    row: int | None = None
    reciprocal: bool = False


class Files:
    """Open files by path, for reading from several threads; a context manager that closes them."""

    def __init__(self):
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def open(self, path: Path) -> None:
        """Opens `path` unless it is open; call before `read_into` from threads."""
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY)

    def read_into(self, buffer: np.ndarray, info: TensorInfo, start: int) -> None:
        """Fills the contiguous `buffer` with the tensor's bytes from `start` on.

        Raises:
            CheckpointError: the file ended early, which its headers did not show: it changed while being read.
        """
        view, done = memoryview(buffer.reshape(-1).view(np.uint8)), 0
        while done < len(view):
            count = os.preadv(self._descriptors[info.path], [view[done:]], info.offset + start + done)
            if count == 0:
                raise CheckpointError(f"{info.path} ended inside tensor {info.name}: it was changed while being read")
            done += count


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary, which a CPU device adopts as it is instead of copying."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)
