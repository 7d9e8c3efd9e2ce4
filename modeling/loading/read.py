"""Filling host buffers with the leaves a plan names, in parallel, with little memory beside the buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor

import numpy as np

from modeling.loading import nvfp4
from modeling.loading.faults import Faults, ranges
from modeling.loading.plan import Leaf, PackedPair, Plan
from modeling.loading.tensors import NUMPY_DTYPES, Files, Piece, TensorInfo, aligned_empty

# Bytes read at once. Small enough that a worker's temporaries stay in its cache, large enough for a disk.
CHUNK = 1 << 20


class Reader:
    """Reads a plan's targets.

    Attributes:
        unusable: NVFP4 tensors found to hold a scale byte of 0xFF.
        rounded: leaves whose float32 values lost bits on the way to bfloat16.
    """

    def __init__(self, files: Files, pool: Executor, progress: Callable[[int], object]):
        self.files, self.pool, self.progress = files, pool, progress
        self.unusable: list[str] = []
        self.rounded: list[str] = []

    def read(self, target: Leaf | PackedPair) -> Iterator[tuple[str, np.ndarray]]:
        """The target's leaves by name, in buffers that belong to the caller."""
        if isinstance(target, Leaf):
            yield target.name, self._leaf(target)
        else:
            codes, scales = self._packed(target)
            # One leaf leaves this frame before the other is handed out, so that neither is kept alive here.
            yield target.codes, codes
            del codes
            yield target.scales, scales

    def _leaf(self, leaf: Leaf) -> np.ndarray:
        out = aligned_empty(leaf.shape, leaf.dtype)
        flat = out.reshape(-1)
        jobs = (job for pair in leaf.pieces for job in _chunks(*pair))

        def run(job: tuple[TensorInfo, int, int, int]) -> tuple[int, bool]:
            info, source, target, size = job
            return size * NUMPY_DTYPES[info.dtype].itemsize, self._run(flat[target : target + size], info, source)

        lossy = False
        for nbytes, lost in self.pool.map(run, jobs):
            self.progress(nbytes)
            lossy |= lost
        if lossy:
            self.rounded.append(leaf.name)
        return out

    def _run(self, out: np.ndarray, info: TensorInfo, source: int) -> bool:
        """Fills `out` from element `source` of the tensor on; whether rounding lost bits."""
        disk = NUMPY_DTYPES[info.dtype]
        start = source * disk.itemsize
        if disk == out.dtype:
            self.files.read_into(out, info, start)
            return False
        values = np.empty(out.shape, disk)
        self.files.read_into(values, info, start)
        out[:] = values
        return not np.array_equal(out.astype(disk), values, equal_nan=True)

    def _packed(self, pair: PackedPair) -> tuple[np.ndarray, np.ndarray]:
        *lead, width = pair.shape
        codes = aligned_empty((*lead, width // 2), np.dtype(np.uint8))
        scales = aligned_empty((*lead, width // 16), np.dtype(np.uint8))
        flat_codes, flat_scales = codes.reshape(-1), scales.reshape(-1)
        num_blocks = pair.info.size // nvfp4.BLOCK_WEIGHTS
        step = CHUNK // nvfp4.BLOCK_BYTES

        def run(first: int) -> tuple[int, bool]:
            last = min(first + step, num_blocks)
            blocks = np.empty((last - first) * nvfp4.BLOCK_BYTES, np.uint8)
            self.files.read_into(blocks, pair.info, first * nvfp4.BLOCK_BYTES)
            bad = nvfp4.repack(blocks, flat_codes[32 * first : 32 * last], flat_scales[4 * first : 4 * last])
            return len(blocks), bad

        unusable = False
        for nbytes, bad in self.pool.map(run, range(0, num_blocks, step)):
            self.progress(nbytes)
            unusable |= bad
        if unusable:
            self.unusable.append(pair.info.name)
        return codes, scales


def _chunks(piece: Piece, info: TensorInfo) -> Iterator[tuple[TensorInfo, int, int, int]]:
    step = CHUNK // NUMPY_DTYPES[info.dtype].itemsize
    for start in range(0, piece.size, step):
        yield info, piece.source + start, piece.target + start, min(step, piece.size - start)


def check_global_scales(plan: Plan, files: Files, subject: object) -> None:
    """Reads every NVFP4 global scale (a few kilobytes) and refuses those that are not positive numbers.

    Raises:
        CheckpointError: names each tensor, with its layer and expert ids.
    """
    faults = Faults(subject)
    for leaf in plan.targets:
        if not (isinstance(leaf, Leaf) and leaf.name.endswith(".global_scale")):
            continue
        [(_, info)] = leaf.pieces
        values = np.empty(info.size, np.float32)
        files.read_into(values, info, 0)
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if len(bad):
            parts = leaf.name.split(".")
            where = f"layer {parts[1]}" if parts[0] == "layers" else parts[0]
            experts = f", experts {ranges(bad.tolist())}" if leaf.shape else ""
            sample = ", ".join(f"{value:g}" for value in values[bad[:4]])
            faults.add(f"{where}{experts}: {info.name} must be positive and finite, found {sample}")
    faults.raise_any("no weight was read")
