"""Filling host buffers with the leaves a plan names, in parallel, with little memory beside the buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np

from modeling.loading import nvfp4
from modeling.loading.faults import Faults, ranges
from modeling.loading.plan import Leaf, PackedPair, Plan, RowPair, Target
from modeling.loading.tensors import NUMPY_DTYPES, Files, Piece, TensorInfo, aligned_empty

# Bytes read at once. Small enough that a worker's temporaries stay in its cache, large enough for a disk.
CHUNK = 1 << 20


class _Outcome(NamedTuple):
    """Of one job: bytes read, whether rounding lost bits, and whether a block scale was no number."""

    nbytes: int
    lossy: bool = False
    unusable: bool = False


class Reader:
    """Reads a plan's targets.

    Attributes:
        unusable: NVFP4 tensors found to hold a block scale that is no number.
        rounded: leaves whose float32 values lost bits on the way to bfloat16.
    """

    def __init__(self, files: Files, pool: Executor, progress: Callable[[int], object]):
        self.files, self.pool, self.progress = files, pool, progress
        self.unusable: list[str] = []
        self.rounded: list[str] = []

    def read(self, target: Target) -> Iterator[tuple[str, np.ndarray]]:
        """The target's leaves by name, in buffers that belong to the caller."""
        if isinstance(target, Leaf):
            yield target.name, self._leaf(target)
            return
        if isinstance(target, RowPair):
            names, (first, second) = target.names, self._rows(target)
        else:
            names, (first, second) = (target.codes, target.scales), self._packed(target)
        # One leaf leaves this frame before the other is handed out, so that neither is kept alive here.
        yield names[0], first
        del first
        yield names[1], second

    def _leaf(self, leaf: Leaf) -> np.ndarray:
        out = aligned_empty(leaf.shape, leaf.dtype)

        def run(job: tuple[TensorInfo, int, int, int]) -> _Outcome:
            info, source, target, size = job
            return self._fill(_elements(out, info).reshape(-1)[target : target + size], info, source)

        self._run(run, (job for pair in leaf.pieces for job in _chunks(*pair)), [leaf.name], leaf.infos)
        if leaf.reciprocal:
            np.reciprocal(out, out=out)
        return out

    def _fill(self, out: np.ndarray, info: TensorInfo, source: int) -> _Outcome:
        """Fills `out` from element `source` of the tensor on."""
        disk = NUMPY_DTYPES[info.dtype]
        if disk == out.dtype:
            self.files.read_into(out, info, source * disk.itemsize)
            return _Outcome(out.nbytes, unusable=info.dtype == "F8_E4M3" and _has_nan(out))
        values = np.empty(out.shape, disk)
        self.files.read_into(values, info, source * disk.itemsize)
        out[:] = values
        return _Outcome(values.nbytes, lossy=not np.array_equal(out.astype(disk), values, equal_nan=True))

    def _rows(self, pair: RowPair) -> tuple[np.ndarray, np.ndarray]:
        outs = aligned_empty(pair.shape, pair.dtype), aligned_empty(pair.shape, pair.dtype)
        num_rows, disk = math.prod(pair.shape[:-1]), NUMPY_DTYPES[pair.info.dtype]
        first, second = (_elements(out, pair.info).reshape(num_rows, -1) for out in outs)
        columns = first.shape[1]
        step = max(1, CHUNK // (2 * columns * disk.itemsize))

        def run(start: int) -> _Outcome:
            both = np.empty((min(step, num_rows - start), 2, columns), first.dtype)
            outcome = self._fill(both, pair.info, 2 * start * columns)
            first[start : start + step], second[start : start + step] = both[:, 0], both[:, 1]
            return outcome

        self._run(run, range(0, num_rows, step), pair.names, pair.infos)
        return outs

    def _packed(self, pair: PackedPair) -> tuple[np.ndarray, np.ndarray]:
        *lead, width = pair.shape
        codes = aligned_empty((*lead, width // 4), np.dtype(np.uint16))
        scales = aligned_empty((*lead, width // 16), np.dtype(np.uint8))
        flat_codes, flat_scales = codes.reshape(-1), scales.reshape(-1)
        num_blocks = pair.info.size // nvfp4.BLOCK_WEIGHTS
        step = CHUNK // nvfp4.BLOCK_BYTES

        def run(first: int) -> _Outcome:
            last = min(first + step, num_blocks)
            blocks = np.empty((last - first) * nvfp4.BLOCK_BYTES, np.uint8)
            self.files.read_into(blocks, pair.info, first * nvfp4.BLOCK_BYTES)
            bad = nvfp4.repack(blocks, flat_codes[16 * first : 16 * last], flat_scales[4 * first : 4 * last])
            return _Outcome(len(blocks), unusable=bad)

        self._run(run, range(0, num_blocks, step), [pair.codes], pair.infos)
        return codes, scales

    def _run[Job](
        self, run: Callable[[Job], _Outcome], jobs: Iterable[Job], names: Sequence[str], infos: Sequence[TensorInfo]
    ) -> None:
        """Runs the jobs of one target in parallel and notes what was found."""
        lossy = unusable = False
        for outcome in self.pool.map(run, jobs):
            self.progress(outcome.nbytes)
            lossy |= outcome.lossy
            unusable |= outcome.unusable
        if lossy:
            self.rounded += names
        if unusable:
            self.unusable += [info.name for info in infos]


def _elements(out: np.ndarray, info: TensorInfo) -> np.ndarray:
    """A leaf's buffer as the elements that a tensor's elements fill: its bytes, where the tensor is one of bytes."""
    return out.view(np.uint8) if NUMPY_DTYPES[info.dtype] == np.uint8 else out


def _has_nan(scales: np.ndarray) -> bool:
    """Whether one of these E4M3 bytes is a NaN, 0x7F or 0xFF."""
    return bool(((scales & 0x7F) == 0x7F).any())


def _chunks(piece: Piece, info: TensorInfo) -> Iterator[tuple[TensorInfo, int, int, int]]:
    step = CHUNK // NUMPY_DTYPES[info.dtype].itemsize
    for start in range(0, piece.size, step):
        yield info, piece.source + start, piece.target + start, min(step, piece.size - start)


def check_global_scales(plan: Plan, files: Files, subject: object) -> None:
    """Reads every NVFP4 global scale (a few kilobytes) and refuses those that are not positive numbers.

    Raises:
        CheckpointError: names each tensor, with its layer and expert ids.
    """
    faults, seen = Faults(subject), set()
    for leaf in plan.targets:
        if not (isinstance(leaf, Leaf) and leaf.name.endswith(".global_scale")):
            continue
        [(_, info)] = leaf.pieces
        if info.name in seen:  # gate and up may share theirs
            continue
        seen.add(info.name)
        values = np.empty(info.size, np.float32)
        files.read_into(values, info, 0)
        with np.errstate(divide="ignore", over="ignore"):
            used = np.reciprocal(values) if leaf.reciprocal else values
        bad = np.flatnonzero(~(np.isfinite(used) & (used > 0)))
        if len(bad):
            parts = leaf.name.split(".")
            where = f"layer {parts[1]}" if parts[0] == "layers" else parts[0]
            experts = f", experts {ranges(bad.tolist())}" if leaf.shape else ""
            sample = ", ".join(f"{value:g}" for value in values[bad[:4]])
            faults.add(f"{where}{experts}: {info.name} must be positive and finite, found {sample}")
    faults.raise_any("no weight was read")
