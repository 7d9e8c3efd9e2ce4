"""Headers of safetensors files, one or sharded. Reads no tensor data.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes back to back.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from modeling.errors import CheckpointError
from modeling.loading.faults import Faults
from modeling.loading.tensors import TensorInfo

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # the format's own limit
_BYTES = dict(
    BOOL=1, U8=1, I8=1, F8_E4M3=1, F8_E5M2=1, F8_E8M0=1, U16=2, I16=2, F16=2, BF16=2, U32=4, I32=4, F32=4, U64=8, I64=8,
    F64=8, C64=8,
)  # fmt: skip


def read_headers(
    path: Path, files: Sequence[Path], extra: Sequence[str], faults: Faults
) -> tuple[dict[str, TensorInfo], bool]:
    """The tensors of one checkpoint.

    Args:
        path: the checkpoint folder or file, to look for an index in.
        files: the safetensors files when there is no index.
        extra: names of files that are read too where they are in the folder, whatever an index says of them.
        faults: receives absent shards, damaged headers, truncated files, and tensors that are in two files or not
            where the index says.

    Returns:
        The tensors by name, and whether every header could be read: only then is a name not returned truly missing.
    """
    index = _read_index(path / INDEX, faults) if path.is_dir() and (path / INDEX).exists() else None
    if index is not None:
        beside = {name for name in extra if (path / name).is_file()}
        files = [path / name for name in sorted(set(index.values()) | beside)]
    tensors: dict[str, TensorInfo] = {}
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        faults.add(f"{INDEX} names files that are not in the folder ({len(absent)}): {', '.join(absent)}")
    complete = not absent
    for file in files:
        if file.name in absent:
            continue
        try:
            infos = read_header(file)
        except CheckpointError as error:
            faults.add(str(error))
            complete = False
            continue
        for info in infos:
            if info.name in tensors:
                faults.add(f"tensor {info.name} is in both {tensors[info.name].path.name} and {file.name}")
            tensors[info.name] = info
            if index is not None and info.name not in index and file.name not in extra:
                faults.add(f"tensor {info.name} is in {file.name} but not in {INDEX}")
        damage = truncation(file, infos)
        if damage:
            faults.add(damage)
    if index is not None and complete:
        _check_index(index, tensors, faults)
    return tensors, complete


def _check_index(index: dict[str, str], tensors: dict[str, TensorInfo], faults: Faults) -> None:
    for name, file in index.items():
        if name not in tensors:
            faults.add(f"tensor {name} is not in {file}, where {INDEX} says it is")
        elif tensors[name].path.name != file:
            faults.add(f"tensor {name} is in {tensors[name].path.name}, but {INDEX} says {file}")


def _read_index(path: Path, faults: Faults) -> dict[str, str] | None:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (UnicodeDecodeError, ValueError, KeyError, TypeError, RecursionError):
        weight_map = None
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    # A shard is a file of this folder; anything else, a path out of it included, is a damaged or hostile index.
    if not all(isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name for name in names):
        faults.add(f'{path.name} must hold a "weight_map" of tensor names to .safetensors files in this folder')
        faults.raise_any("nothing was read")
    return weight_map


def read_header(path: Path) -> list[TensorInfo]:
    """Parses one file's header.

    Raises:
        CheckpointError: the header is not valid. A file too short for its tensors is left to `truncation`.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise CheckpointError(
                f"{path.name} is truncated or not safetensors: {size} bytes cannot hold the header it announces"
            )
        if length > _MAX_HEADER:
            raise CheckpointError(f"{path.name} is not safetensors: its header would be {length} bytes")
        raw = file.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} has a damaged header: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name} has a damaged header: it is not a JSON object")
    header.pop("__metadata__", None)
    infos = sorted((_tensor(path, name, entry, 8 + length) for name, entry in header.items()), key=lambda i: i.offset)
    _check_contiguous(path, infos, 8 + length)
    return infos


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"it names {', '.join(twice)} twice")
    return found


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (
        isinstance(dtype, str) and _naturals(shape) and len(shape) <= 8 and _naturals(offsets) and len(offsets) == 2
    ):
        raise CheckpointError(
            f"{path.name} has a damaged header: tensor {name} has no valid dtype, shape, data_offsets"
        )
    if dtype not in _BYTES:
        raise CheckpointError(f"{path.name}: tensor {name} has type {dtype}, which this loader does not know")
    start, end = offsets
    if end - start != math.prod(shape) * _BYTES[dtype]:
        raise CheckpointError(
            f"{path.name} has a damaged header: tensor {name} is {dtype} {shape} but has {end - start} bytes"
        )
    return TensorInfo(name, dtype, tuple(shape), path, data_start + start, end - start)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_contiguous(path: Path, infos: list[TensorInfo], data_start: int) -> None:
    end = data_start
    for info in sorted(infos, key=lambda i: (i.offset, i.nbytes)):
        if info.offset != end:
            raise CheckpointError(f"{path.name} has a damaged header: tensor {info.name} overlaps or leaves a gap")
        end += info.nbytes


def truncation(path: Path, infos: Sequence[TensorInfo]) -> str | None:
    """A sentence when the file's size is not what its header asks for, else None."""
    size = os.stat(path).st_size  # noqa: PTH116
    end = max((info.offset + info.nbytes for info in infos), default=size)
    if size < end:
        cut = [info.name for info in infos if info.offset + info.nbytes > size]
        return f"{path.name} is truncated: it has {size} bytes of {end}, so tensors from {cut[0]} on are cut off"
    if size > end:
        return f"{path.name} has {size - end} bytes after its last tensor: it is damaged"
    return None
