"""Block sizes as data: what was measured to be fastest on a device, in `tuned/<device>.json`.

    block_sizes("dense_gemv", case_of(matrices, num_tokens))  # {"row_groups": 1, "num_warps": 8}

An op's sizes hang on its matrices' format and shapes and on the number of tokens: a case. Where the table does not have
one, the op decides by its own rule. A device without a table uses the H200's: one GPU's sizes are right on another too,
only perhaps not the fastest. `python -m benchmarks.tune` measures, and writes the tables.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

TABLES = Path(__file__).with_name("tuned")
DEFAULT = "nvidia_h200"
# Ops, and the names of their sizes.
SIZES: dict[str, tuple[str, ...]] = {
    "decode_attention": ("num_splits", "block_keys", "num_warps", "num_stages"),
    "dense_gemv": ("row_groups", "num_warps"),
    "dense_gemv_swiglu": ("row_groups", "num_warps"),
    "moe_down": ("down_row_groups", "down_warps"),
    "moe_gate_up": ("row_groups", "num_warps"),
    "router": ("experts", "num_warps"),
}
Cases = dict[str, dict[str, dict[str, int | float]]]  # by op and case: sizes, and `us`, the microseconds measured


def block_sizes(op: str, case: str) -> dict[str, int] | None:
    """An op's sizes for a case on the current device; None if the table does not have it.

    Raises:
        ValueError: there is no such op, or the table is malformed.
    """
    if op not in SIZES:
        raise ValueError(f"no op {op!r} has tuned block sizes; there are {', '.join(SIZES)}")
    entry = _table(jax.devices()[0].device_kind).get(op, {}).get(case)
    return None if entry is None else {name: int(entry[name]) for name in SIZES[op]}


def case_of(matrices: Sequence[Any], num_tokens: int) -> str:
    """The case of a GEMV with `warp_tiles.Matrix`es of one format: "nvfp4 4096x2048 512x2048 512x2048, 5-8 tokens"."""
    first = matrices[0]
    packed = 1 if first.scales is None else 4  # codes a stored word
    name = str(first.weight.dtype).replace("bfloat", "bf") if first.scales is None else "nvfp4"
    shapes = ((*matrix.weight.shape[:-1], matrix.weight.shape[-1] * packed) for matrix in matrices)
    return f"{name} {' '.join('x'.join(map(str, shape)) for shape in shapes)}, {tokens_bucket(num_tokens)}"


def attention_case(batch: int, num_kv_heads: int, entries: int, window: int | None) -> str:
    """The case of decode attention, of a table's entries the nearest power of two: "4 kv heads, 2048 pages, 1 row"."""
    reach = f"window {window}" if window is not None else f"{1 << round(math.log2(entries))} pages"
    return f"{num_kv_heads} kv heads, {reach}, {batch} row{'s' if batch > 1 else ''}"


def tokens_bucket(num_tokens: int) -> str:
    """The tokens that share their sizes with `num_tokens`."""
    if num_tokens == 1:
        return "1 token"
    return "2-4 tokens" if num_tokens <= 4 else "5-8 tokens" if num_tokens <= 8 else "9 tokens or more"


def table_path(device_kind: str) -> Path:
    """Where the table of a device is, if it has one."""
    return TABLES / (re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json")


def read_table(path: Path) -> dict[str, Any]:
    """A table: device, date, jax, and cases.

    Raises:
        ValueError: it is not as it should be; the message says where.
    """
    try:
        table = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    _check_keys(str(path), table, ("cases", "date", "device", "jax"))
    _check_keys(f"{path}: cases", table["cases"], SIZES, all_of_them=False)
    for op, cases in table["cases"].items():
        if not isinstance(cases, dict):
            raise ValueError(f"{path}: {op} is no object of cases")
        for case, entry in cases.items():
            where = f"{path}: {op}, {case!r}"
            _check_keys(where, entry, (*SIZES[op], "us"))
            for name, value in entry.items():
                number = isinstance(value, (int, float) if name == "us" else int) and not isinstance(value, bool)
                if not number or value <= 0:
                    kind = "number" if name == "us" else "integer"
                    raise ValueError(f"{where}: {name} is {value!r}, not a positive {kind}")
    return table


def _check_keys(where: str, found: Any, known: Sequence[str] | dict[str, Any], all_of_them: bool = True) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{where}: an object is expected, not {found!r}")
    unknown, missing = sorted(found.keys() - set(known)), sorted(set(known) - found.keys())
    if unknown:
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    if missing and all_of_them:
        raise ValueError(f"{where}: {', '.join(missing)} missing")


@functools.cache
def _table(device_kind: str) -> Cases:
    path = table_path(device_kind)
    return read_table(path if path.exists() else TABLES / f"{DEFAULT}.json")["cases"]
