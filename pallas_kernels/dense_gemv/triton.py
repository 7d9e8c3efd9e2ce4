"""Dense GEMV for up to eight tokens: Pallas, Triton lowering.

One program computes `row_groups` times 8 rows of the output and reads their weights once; its warps split the columns
and meet at the end (`pallas_kernels.warp_tiles`). All that a program reads is asked for before anything is computed, so
that the residual add and the norm, which every program does for itself, run while the weights are under way.

Roofline: bytes of the weights. At Flint's sizes a program's share is 20 to 70 KB: the launch, one memory round trip and
the tail of the last program count as much as the bandwidth, and in NVFP4 so does decoding.

Refuses more than 8 tokens, columns that are no multiple of 8 (BF16) or 16 (NVFP4).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.warp_tiles import ROW_GROUP, Activations, Fragment, Matrix, Tiles


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Tunable sizes: row groups (of 8) a program, and warps."""

    row_groups: int = 2
    num_warps: int = 8


def dense_gemv(x, residual, norm_weight, matrices, *, activation, norm_eps, out_dtype, blocks, interpret):
    """See `pallas_kernels.dense_gemv.dense_gemv`."""
    num_tokens, num_columns = x.shape
    tiles = Tiles(num_columns, blocks.num_warps, matrices[0].weight_format, num_tokens, interpret)
    rows = [matrix.weight.shape[0] for matrix in matrices]
    block_rows = blocks.row_groups * ROW_GROUP
    if activation == "swiglu":
        grid, out_rows = pl.cdiv(rows[0], block_rows), rows[0]
    else:
        grid, out_rows = sum(pl.cdiv(n, block_rows) for n in rows), sum(rows)
    out_shape = [jax.ShapeDtypeStruct((num_tokens, out_rows), out_dtype)]
    if residual is not None:
        out_shape.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
    leaves, treedef = jax.tree.flatten((x, residual, norm_weight, tuple(matrices)))

    def kernel(*refs):
        x_ref, residual_ref, norm_ref, matrix_refs = jax.tree.unflatten(treedef, refs[: len(leaves)])
        out_ref, *stream_ref = refs[len(leaves) :]
        norm = Norm(residual_ref, norm_ref, norm_eps, stream_ref[0] if stream_ref else None)
        run = _swiglu if activation == "swiglu" else _concatenate
        run(tiles, rows, blocks.row_groups, x_ref, norm, matrix_refs, out_ref)

    return pl.pallas_call(
        kernel,
        grid=(grid,),
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
        interpret=interpret,
        name="dense_gemv",
    )(*leaves)


@dataclasses.dataclass(frozen=True)
class Norm:
    """The prologue's operands: nothing, a norm, or a residual add and a norm whose sum goes to `stream`."""

    residual: Any = None
    weight: Any = None
    eps: float = 0.0
    stream: Any = None


def ask(tiles: Tiles, x_ref: Any, norm: Norm) -> Callable[[], list[Activations]]:
    """Loads a program's tokens. What is returned makes them ready: every step's activations, normalised if there is a
    norm, and spread for `multiply`."""
    steps = range(tiles.num_steps)
    if norm.weight is None:
        loaded = [tiles.load_tokens(x_ref, step) for step in steps]
        return lambda: [tiles.spread(x) for x in loaded]
    if tiles.num_tokens == 1 and tiles.lanes_hold_a_row:
        normalised_row = _ask_row(tiles, x_ref, norm)
        return lambda: _shared(tiles, normalised_row())
    x = [tiles.load_tokens(x_ref, step) for step in steps]
    residual = None if norm.residual is None else [tiles.load_tokens(norm.residual, step) for step in steps]
    weights = [tiles.load_columns(norm.weight, step) for step in steps]
    return lambda: _normalised(tiles, x, residual, weights, norm)


def _normalised(tiles, x, residual, weights, norm: Norm) -> list[Activations]:
    """All tokens, each lane what it multiplies."""
    sums = jax.tree.map(lambda part: part.astype(jnp.float32), x)
    if residual is not None:
        sums = jax.tree.map(lambda part, more: part + more.astype(jnp.float32), sums, residual)
    squares = functools.reduce(jnp.add, [part * part for part in jax.tree.leaves(sums)])
    scale = lax.rsqrt(tiles.sum_by_token(squares) / tiles.num_columns + norm.eps)
    if norm.stream is not None:
        for step, stream in enumerate(jax.tree.map(lambda part: part.astype(jnp.bfloat16), sums)):
            tiles.store_tokens(norm.stream, stream, step, mask=_first_program())
    normed = jax.tree.map(lambda part, w: (part * scale * w.astype(jnp.float32)).astype(jnp.bfloat16), sums, weights)
    return [tiles.spread(step) for step in normed]


def _ask_row(tiles: Tiles, x_ref: Any, norm: Norm) -> Callable[[], jax.Array]:
    """The same for one token, each element once a program: bfloat16, held as of `Tiles.row_places`."""
    column, inside = tiles.row_places()
    row = jnp.zeros_like(column)

    def load(ref: Any, *at: jax.Array) -> jax.Array:
        return plt.load(ref.at[at], mask=inside, other=jnp.zeros((), ref.dtype))

    x, weight = load(x_ref, row, column), load(norm.weight, column)
    residual = None if norm.residual is None else load(norm.residual, row, column)

    def normalised() -> jax.Array:
        total = x.astype(jnp.float32)
        if residual is not None:
            total = total + residual.astype(jnp.float32)
        scale = lax.rsqrt((total * total).sum() / tiles.num_columns + norm.eps)
        if norm.stream is not None:
            plt.store(norm.stream.at[row, column], total.astype(jnp.bfloat16), mask=inside & _first_program())
        return (total * scale * weight.astype(jnp.float32)).astype(jnp.bfloat16)

    return normalised


def _shared(tiles: Tiles, row: jax.Array) -> list[Activations]:
    return [tiles.spread(tiles.share_row(row, step)) for step in range(tiles.num_steps)]


def _first_program() -> jax.Array:
    """The stream is the same in every program; this one writes it."""
    return pl.program_id(0) == 0


Loaded = list[list[tuple[Fragment, Fragment]]]  # by step and row group


def load_groups(tiles: Tiles, matrix: Matrix, row: Any, row_groups: int, num_rows: int, expert: Any = None) -> Loaded:
    """The weights of `row_groups` row groups from `row` on, of a matrix of `num_rows` rows."""
    bound = num_rows if num_rows % (row_groups * ROW_GROUP) else None
    return [
        [load_pair(tiles, matrix, step, row + group * ROW_GROUP, bound, expert) for group in range(row_groups)]
        for step in range(tiles.num_steps)
    ]


def load_pair(tiles: Tiles, matrix: Matrix, step: int, row: Any, bound: Any, expert: Any) -> tuple[Fragment, Fragment]:
    """The weights of one row group at one step; rows from `bound` on, if given, are zero."""
    upper, lower = (tiles.load(matrix, step, row + first, bound, expert) for first in (0, ROW_GROUP // 2))
    return upper, lower


def multiply_groups(tiles: Tiles, loaded: Loaded, activations: list[Activations], empty: jax.Array) -> list:
    """Each row group times the tokens: accumulators for `Tiles.finish`. `empty` is the fence's."""
    sums = [[empty] * tiles.num_sets for _ in loaded[0]]
    for step, groups in enumerate(loaded):
        sums = [
            tiles.multiply(*pair, activations[step], total, empty) for pair, total in zip(groups, sums, strict=True)
        ]
    return sums


def accumulator_scales(tiles: Tiles, matrices: Any, expert: Any = None) -> list[jax.Array]:
    """What each matrix' float32 sums are multiplied with; nothing in BF16."""
    scales = [matrix.global_scale for matrix in matrices if matrix.global_scale is not None]
    return [(scale[()] if expert is None else scale[expert]) * tiles.unit() for scale in scales]


def scaled(sums: jax.Array, scales: Sequence[jax.Array]) -> jax.Array:
    """Sums times the scale of their matrix, if there is one."""
    return sums * scales[0] if scales else sums


def store_rows(
    tiles: Tiles,
    out_ref: Any,
    values: jax.Array,
    row: Any,
    end: Any,
    count: int,
    lead: tuple = (),
    first_token: Any = 0,
) -> None:
    """Stores a finished array's `count` row groups at [*lead, first_token + token, row + ...], but for rows from `end`
    on, if given, and for tokens that there are not."""
    place, token = tiles.places(values.shape)
    fits = (token < tiles.num_tokens) & (first_token + token < out_ref.shape[-2])
    if values.shape[-1] > count:
        fits &= place < count * ROW_GROUP
    if end is not None:
        fits &= row + place < end
    plt.store(out_ref.at[(*lead, first_token + token, row + place)], values.astype(out_ref.dtype), mask=fits)


def _concatenate(tiles, rows, row_groups, x_ref, norm, matrices, out_ref) -> None:
    """Matrices one below the other: a program works on one of them."""
    block = row_groups * ROW_GROUP
    program = pl.program_id(0)
    firsts, starts = [0], [0]  # of each matrix: its first program, its first row of the output
    for n in rows:
        firsts.append(firsts[-1] + pl.cdiv(n, block))
        starts.append(starts[-1] + n)

    # Outside of the branches, which then differ in pointers alone: a compiler makes one load of three.
    first_rows = [(program - first) * block for first in firsts[:-1]]

    def choose(index: int) -> tuple[Loaded, list[jax.Array]]:
        """The weights of the program's matrix, and in NVFP4 their scale."""

        def load():
            loaded = load_groups(tiles, matrices[index], first_rows[index], row_groups, rows[index])
            return loaded, accumulator_scales(tiles, matrices[index : index + 1])

        if index + 1 == len(rows):
            return load()
        return lax.cond(program < firsts[index + 1], load, lambda: choose(index + 1))

    activations = ask(tiles, x_ref, norm)
    loaded, scales = choose(0)
    empty = tiles.fence()
    sums = tiles.finish(multiply_groups(tiles, loaded, activations(), empty))
    offset, end = jnp.int32(starts[-2] - firsts[-2] * block), jnp.int32(starts[-1])
    for index in range(len(rows) - 1, 0, -1):
        before = program < firsts[index]
        offset = jnp.where(before, jnp.int32(starts[index - 1] - firsts[index - 1] * block), offset)
        end = jnp.where(before, jnp.int32(starts[index]), end)
    whole = all(n % block == 0 for n in rows)
    store_rows(tiles, out_ref, scaled(sums, scales), offset + program * block, None if whole else end, row_groups)


def _swiglu(tiles, rows, row_groups, x_ref, norm, matrices, out_ref) -> None:
    """Gate and up, rounded, then the activation, rounded."""
    row = pl.program_id(0) * row_groups * ROW_GROUP
    activations, pair = ask(tiles, x_ref, norm), load_gate_up(tiles, matrices, row, row_groups, rows[0])
    empty = tiles.fence()
    gate, up = gate_and_up(tiles, pair, activations(), empty)
    gate, up = rounded(gate), rounded(up)
    end = rows[0] if rows[0] % (row_groups * ROW_GROUP) else None
    store_rows(tiles, out_ref, silu(gate) * up, row, end, row_groups)


class GateUp(NamedTuple):
    """The weights of some rows of both matrices, and the scales of their sums."""

    gate: Loaded
    up: Loaded
    scales: list[jax.Array]


def load_gate_up(tiles: Tiles, matrices: Any, row: Any, row_groups: int, num_rows: int, expert: Any = None) -> GateUp:
    """`row_groups` row groups from `row` on, of matrices of `num_rows` rows."""
    loaded = [load_groups(tiles, matrix, row, row_groups, num_rows, expert) for matrix in matrices]
    return GateUp(loaded[0], loaded[1], accumulator_scales(tiles, matrices, expert))


def gate_and_up(tiles: Tiles, pair: GateUp, x: list[Activations], empty: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both products, unrounded; `empty` is the fence's."""
    gates, ups = (multiply_groups(tiles, part, x, empty) for part in (pair.gate, pair.up))
    padding = [[empty] * tiles.num_sets] * (pl.next_power_of_2(len(gates)) - len(gates))
    both = tiles.finish([*gates, *padding, *ups, *padding])
    return scaled(_of_pair(both, 0), pair.scales[:1]), scaled(_of_pair(both, 1), pair.scales[1:])


def _of_pair(array: jax.Array, which: int) -> jax.Array:
    """One of the two halves of the last axis, [..., 2 * n] -> [..., n]."""
    parts = array.reshape(*array.shape[:-1], 2, -1)
    place = lax.broadcasted_iota(jnp.int32, parts.shape, parts.ndim - 2)
    return jnp.where(place == which, parts, 0.0).sum(axis=-2)


def rounded(x: jax.Array) -> jax.Array:
    """float32, rounded to bfloat16."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def silu(x: jax.Array) -> jax.Array:
    """`x * sigmoid(x)`, float32, with an accurate exponential and division."""
    return x * (1 / (1 + jnp.exp(-x)))
