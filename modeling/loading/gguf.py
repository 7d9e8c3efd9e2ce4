"""Headers of GGUF files. Reads no tensor data.

For a checkpoint only the tensors, the alignment and the few metadata keys in `KEPT` matter; the rest, a tokenizer for
instance, is skipped over (`read_header`) or is all that matters (`read_metadata`). Version 3, little-endian. The
`gguf` package's own reader keeps every string as an array of its own: 22 s for a vocabulary of 150,000.
"""

from __future__ import annotations

import itertools
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

from modeling.errors import CheckpointError
from modeling.loading.tensors import TensorInfo

PREC_A4 = "general.tensor_extra.prec_a4"
_ALIGNMENT = "general.alignment"
KEPT = frozenset({PREC_A4, _ALIGNMENT, "general.architecture"})

# Type id -> name, elements a block, bytes a block. Types that are only ever refused need a name, not a size.
_TYPES = {0: ("F32", 1, 4), 30: ("BF16", 1, 2), 40: ("NVFP4", 64, 36)}
_NAMES = {1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K"}
_NAMES |= {13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 20: "IQ4_NL", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64"}
_NAMES |= {28: "F64", 39: "MXFP4"}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NAME, _MAX_VALUE = 1 << 16, 1 << 26  # bytes


class _Cursor:
    """Reads little-endian fields and never past the end of the file, whatever lengths the file claims."""

    def __init__(self, file: BinaryIO, path: Path, size: int):
        self.file, self.path, self.size = file, path, size

    def bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path.name} {what}")

    def require(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise self.bad("is truncated or damaged: its header runs past the end of the file")

    def take(self, code: str) -> Any:
        count = struct.calcsize("<" + code)
        self.require(count)
        return struct.unpack("<" + code, self.file.read(count))[0]

    def skip(self, count: int) -> None:
        self.require(count)
        self.file.seek(count, 1)

    def string(self, longest: int) -> str:
        length = self.take("Q")
        if length > longest:
            raise self.bad(f"is damaged: a string of {length} bytes in its header")
        self.require(length)
        try:
            return self.file.read(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad("is damaged: a name in its header is not UTF-8") from None

    def value(self, kind: int, keep: bool, depth: int = 0) -> Any:
        """One metadata value; None where it is only skipped."""
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])
        if kind == _STRING:
            return self.string(_MAX_VALUE) if keep else self.skip(self.take("Q"))
        if kind != _ARRAY or depth > 4:
            raise self.bad(f"is damaged: metadata of type {kind}")
        element, count = self.take("I"), self.take("Q")
        if element in _SCALARS and not keep:
            return self.skip(count * struct.calcsize("<" + _SCALARS[element]))
        self.require(count * (struct.calcsize("<" + _SCALARS[element]) if element in _SCALARS else 8))
        return [self.value(element, keep, depth + 1) for _ in range(count)]


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, Any], list[str]]:
    """Parses one file's header.

    Returns:
        The tensors by name (shapes outermost first), the metadata in `KEPT`, and faults that leave the rest of the
        header readable: names that occur twice, misaligned or overlapping data, a file too short for its tensors.

    Raises:
        CheckpointError: the header cannot be read at all.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        cursor = _Cursor(file, path, size)
        num_tensors, num_keys = _preamble(cursor)
        metadata, faults = _metadata(cursor, num_keys, KEPT)
        alignment = metadata.get(_ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise cursor.bad(f"is damaged: {_ALIGNMENT} is {alignment}, not a power of two of at least 8")
        cursor.require(num_tensors * 24)
        entries = [_entry(cursor) for _ in range(num_tensors)]
        data_start = -(-file.tell() // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, type_id, shape, offset in entries:
        if name in tensors:
            faults.append(f"tensor {name} occurs twice in {path.name}")
        if offset % alignment:
            faults.append(f"tensor {name} is misaligned in {path.name}: offset {offset}, alignment {alignment}")
        tensors[name] = _tensor(path, name, type_id, shape, data_start + offset)
    return tensors, metadata, faults + _extents(path, list(tensors.values()), size)


def read_metadata(path: Path) -> dict[str, Any]:
    """All metadata of one file: key -> number, string or list. A tokenizer may be in there.

    Raises:
        CheckpointError: the header cannot be read.
    """
    with path.open("rb") as file:
        cursor = _Cursor(file, path, path.stat().st_size)
        _, num_keys = _preamble(cursor)
        return _metadata(cursor, num_keys, only=None)[0]


def metadata_only(path: Path) -> bytes:
    """A GGUF file with the metadata of `path`, its tokenizer for instance, and without tensors.

    Raises:
        CheckpointError: the header cannot be read.
    """
    with path.open("rb") as file:
        cursor = _Cursor(file, path, path.stat().st_size)
        _, num_keys = _preamble(cursor)
        _metadata(cursor, num_keys, only=frozenset())
        end = file.tell()
        file.seek(0)
        header = bytearray(file.read(end))
    header[8:16] = bytes(8)  # the number of tensors
    return bytes(header)


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    cursor.require(24)
    if cursor.file.read(4) != b"GGUF":
        raise cursor.bad("is not a GGUF file: it does not start with GGUF")
    version = cursor.take("I")
    if version == 3 << 24:
        raise cursor.bad("is a big-endian GGUF file; only little-endian ones are supported")
    if version != 3:
        raise cursor.bad(f"has GGUF version {version}; only version 3 is supported")
    return cursor.take("Q"), cursor.take("Q")


def _metadata(cursor: _Cursor, count: int, only: frozenset[str] | None) -> tuple[dict[str, Any], list[str]]:
    cursor.require(count * 12)
    kept, seen, faults = {}, set(), []
    for _ in range(count):
        key, kind = cursor.string(_MAX_NAME), cursor.take("I")
        keep = only is None or key in only
        value = cursor.value(kind, keep)
        if key in seen:
            faults.append(f"metadata key {key} occurs twice in {cursor.path.name}")
        seen.add(key)
        if keep:
            kept[key] = value
    return kept, faults


def _entry(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name, rank = cursor.string(_MAX_NAME), cursor.take("I")
    if rank > 4:
        raise cursor.bad(f"is damaged: tensor {name} has {rank} dimensions")
    dims = [cursor.take("Q") for _ in range(rank)]
    type_id, offset = cursor.take("I"), cursor.take("Q")
    return name, type_id, tuple(reversed(dims)), offset  # the file lists the innermost dimension first


def _tensor(path: Path, name: str, type_id: int, shape: tuple[int, ...], offset: int) -> TensorInfo:
    dtype, block, block_bytes = _TYPES.get(type_id, (_NAMES.get(type_id, f"type {type_id}"), 1, 0))
    nbytes = math.prod(shape) // block * block_bytes
    return TensorInfo(name, dtype, shape, path, offset, nbytes)


def _extents(path: Path, tensors: list[TensorInfo], size: int) -> list[str]:
    faults = []
    tensors.sort(key=lambda info: info.offset)
    cut = [info.name for info in tensors if info.offset + info.nbytes > size]
    if cut:
        end = max(info.offset + info.nbytes for info in tensors)
        faults.append(
            f"{path.name} is truncated: it has {size} bytes of {end}, so {', '.join(cut[:8])} "
            f"{'and others ' if len(cut) > 8 else ''}cannot be read"
        )
    faults += [
        f"tensors {a.name} and {b.name} overlap in {path.name}"
        for a, b in itertools.pairwise(tensors)
        if a.offset + a.nbytes > b.offset
    ]
    return faults
