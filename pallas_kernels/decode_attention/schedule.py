"""How decode attention is cut into programs. Changes nothing but speed and the order of sums."""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels.tuning import attention_case, block_sizes

PAGE_SIZE = 64  # tokens
MIN_HEADS = 8  # of a kv head's group, after padding: the least a matrix instruction takes
# At once: three on each of the H200's 132 processors, as their tiles fill its shared memory.
PROGRAMS = 396


MERGED_PARTS = 16  # at most, by one program at once: they are all in registers
COUNTERS = 1 + MERGED_PARTS  # of a row and kv head: for the groups, and for each group's parts


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Block sizes of the kernel.

    Attributes:
        num_splits: programs that share the keys of one row and kv head; another one has the new token.
        block_keys: keys a step: 16, 32, 64 or 128.
        num_warps: of a program.
        num_stages: one tile less than this is in flight.
    """

    num_splits: int
    block_keys: int = 64
    num_warps: int = 4
    num_stages: int = 3


def merge_groups(parts: int) -> tuple[int, int]:
    """How parts are merged: groups, and parts in each. Above `MERGED_PARTS` first within groups, then these."""
    if parts <= MERGED_PARTS:
        return 1, parts
    size = -(-parts // min(MERGED_PARTS, math.isqrt(parts - 1) + 1))
    return -(-parts // size), size


def max_tiles(entries: int, window: int | None, block_keys: int) -> int:
    """The most tiles of `block_keys` keys that a token can see before itself, if its table has `entries` pages."""
    tiles = -(-entries * PAGE_SIZE // block_keys)
    # Keys that begin anywhere in a tile touch one tile more than they fill.
    return tiles if window is None else min(tiles, -(-(window - 1 + block_keys - 1) // block_keys))


def default_schedule(
    batch: int, num_kv_heads: int, entries: int, window: int | None, num_splits: int | None = None
) -> Schedule:
    """A schedule for the longest context that the table allows: the tuned one, or else a rule.

    Without a window as many splits as run at once, room left for the programs of new tokens. A sliding layer is a
    matter of latency: one tile a split, unless that makes many more programs than run at once.
    """
    case = attention_case(batch, num_kv_heads, entries, window)
    if num_splits is None and (sizes := block_sizes("decode_attention", case)):
        return Schedule(**sizes)
    rows = batch * num_kv_heads
    tiles = max(1, max_tiles(entries, window, Schedule.block_keys))
    if num_splits is None and window is None:
        num_splits = max(1, min(tiles, (PROGRAMS - 1) // rows))
    elif num_splits is None:
        num_splits = -(-tiles // max(1, round(tiles * rows / PROGRAMS)))
    tiles_a_split = -(-tiles // num_splits)
    return Schedule(num_splits, num_stages=min(Schedule.num_stages, tiles_a_split + 1))
