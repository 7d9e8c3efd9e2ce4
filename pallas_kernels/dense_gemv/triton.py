"""Dense GEMV for up to eight tokens: Pallas, Triton lowering.

One program computes `row_groups` times 16 rows of the output and reads their weights once; its warps split the columns
and meet at the end (`pallas_kernels.warp_tiles`). All weights of a program are asked for before anything else, so that
the residual add and the norm, which every program does for itself, run while they are under way.

Roofline: bytes of the weights. At Flint's sizes a program's share is 20 to 70 KB: the launch, one memory round trip and
the tail of the last program count as much as the bandwidth, and in NVFP4 so does decoding.

Refuses more than 8 tokens, columns that are no multiple of 8 (BF16) or 16 (NVFP4).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.warp_tiles import ROW_GROUP, Fragment, Matrix, Tiles, of_pair


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Tunable sizes: row groups (of 16) a program, and warps."""

    row_groups: int = 1
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


def normalised(tiles: Tiles, x_ref: Any, norm: Norm) -> list[list[jax.Array]]:
    """Every step's activations, normalised if there is a norm and spread for `multiply`."""
    steps = range(tiles.num_steps)
    if norm.weight is None:
        return [tiles.spread(tiles.load_tokens(x_ref, step)) for step in steps]
    if tiles.num_tokens == 1 and tiles.lanes_hold_a_row:
        row = normalised_row(tiles, x_ref, norm)
        return [tiles.spread(tiles.share_row(row, step)) for step in steps]
    sums, squares = [], tiles.zeros()
    weights = [tiles.load_columns(norm.weight, step) for step in steps]
    for step in steps:
        parts = [part.astype(jnp.float32) for part in tiles.load_tokens(x_ref, step)]
        if norm.residual is not None:
            added = tiles.load_tokens(norm.residual, step)
            parts = [part + more.astype(jnp.float32) for part, more in zip(parts, added, strict=True)]
        for part in parts:
            squares = squares + part * part
        sums.append(parts)
    if tiles.single:  # the lanes hold different columns of one token
        scale = lax.rsqrt(squares.sum() / tiles.num_columns + norm.eps)
    else:
        mean = squares.sum(axis=3).sum(axis=2).sum(axis=0) / tiles.num_columns  # [8 tokens]
        scale = lax.rsqrt(mean + norm.eps)[None, :, None, None]
    if norm.stream is not None:
        for step in steps:
            stream = [part.astype(jnp.bfloat16) for part in sums[step]]
            tiles.store_tokens(norm.stream, stream, step, mask=_first_program())
    return [
        tiles.spread(
            [
                (part * scale * weight.astype(jnp.float32)).astype(jnp.bfloat16)
                for part, weight in zip(sums[step], weights[step], strict=True)
            ]
        )
        for step in steps
    ]


def normalised_row(tiles: Tiles, x_ref: Any, norm: Norm) -> jax.Array:
    """The same for one token, each element once a program instead of once for each of eight tokens: bfloat16, held as
    of `Tiles.row_places`."""
    column, inside = tiles.row_places()
    row = jnp.zeros_like(column)

    def load(ref: Any, *at: jax.Array) -> jax.Array:
        return plt.load(ref.at[at], mask=inside, other=jnp.zeros((), ref.dtype)).astype(jnp.float32)

    total, weight = load(x_ref, row, column), load(norm.weight, column)
    if norm.residual is not None:
        total = total + load(norm.residual, row, column)
    scale = lax.rsqrt((total * total).sum() / tiles.num_columns + norm.eps)
    if norm.stream is not None:
        plt.store(norm.stream.at[row, column], total.astype(jnp.bfloat16), mask=inside & _first_program())
    return (total * scale * weight).astype(jnp.bfloat16)


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
    upper, lower = (tiles.load(matrix, step, row + half, bound, expert) for half in (0, ROW_GROUP // 2))
    return upper, lower


def multiply_groups(tiles: Tiles, loaded: Loaded, activations: list[list[jax.Array]]) -> list[jax.Array]:
    """Each row group times the tokens: accumulators for `Tiles.finish`."""
    sums = [tiles.zeros() for _ in loaded[0]]
    for step, groups in enumerate(loaded):
        sums = [tiles.multiply(*pair, activations[step], total) for pair, total in zip(groups, sums, strict=True)]
    return sums


def accumulator_scale(tiles: Tiles, matrix: Matrix, expert: Any = None) -> Any:
    """What the float32 sums are multiplied with."""
    if matrix.global_scale is None:
        return jnp.float32(1)
    return (matrix.global_scale[()] if expert is None else matrix.global_scale[expert]) * tiles.unit()


def store_rows(tiles: Tiles, out_ref: Any, values: jax.Array, row: Any, end: Any, count: int, lead: tuple = ()) -> None:
    """Stores a finished array's `count` row groups at [token, row + ...], but for rows from `end` on, if given."""
    place, token = tiles.places(values.shape)
    fits = token < tiles.num_tokens
    if values.shape[-1] > count:
        fits &= place < count * ROW_GROUP
    if end is not None:
        fits &= row + place < end
    plt.store(out_ref.at[(*lead, token, row + place)], values.astype(out_ref.dtype), mask=fits)


def _concatenate(tiles, rows, row_groups, x_ref, norm, matrices, out_ref) -> None:
    """Matrices one below the other: a program works on one of them."""
    block = row_groups * ROW_GROUP
    program = pl.program_id(0)
    firsts, starts = [0], [0]  # of each matrix: its first program, its first row of the output
    for n in rows:
        firsts.append(firsts[-1] + pl.cdiv(n, block))
        starts.append(starts[-1] + n)

    def choose(index: int) -> Loaded:
        row = (program - firsts[index]) * block
        load = functools.partial(load_groups, tiles, matrices[index], row, row_groups, rows[index])
        if index + 1 == len(rows):
            return load()
        return lax.cond(program < firsts[index + 1], load, lambda: choose(index + 1))

    loaded = choose(0)
    sums = tiles.finish(multiply_groups(tiles, loaded, normalised(tiles, x_ref, norm)))
    offset, end = jnp.int32(starts[-2] - firsts[-2] * block), jnp.int32(starts[-1])
    scale = accumulator_scale(tiles, matrices[-1])
    for index in range(len(rows) - 1, 0, -1):
        before = program < firsts[index]
        offset = jnp.where(before, jnp.int32(starts[index - 1] - firsts[index - 1] * block), offset)
        end = jnp.where(before, jnp.int32(starts[index]), end)
        scale = jnp.where(before, accumulator_scale(tiles, matrices[index - 1]), scale)
    whole = all(n % block == 0 for n in rows)
    store_rows(tiles, out_ref, sums * scale, offset + program * block, None if whole else end, row_groups)


def _swiglu(tiles, rows, row_groups, x_ref, norm, matrices, out_ref) -> None:
    """Gate and up, rounded, then the activation, rounded."""
    row = pl.program_id(0) * row_groups * ROW_GROUP
    gate, up = gate_and_up(tiles, matrices, row, row_groups, rows[0], lambda: normalised(tiles, x_ref, norm))
    gate, up = (value.astype(jnp.bfloat16).astype(jnp.float32) for value in (gate, up))
    end = rows[0] if rows[0] % (row_groups * ROW_GROUP) else None
    store_rows(tiles, out_ref, silu(gate) * up, row, end, row_groups)


def gate_and_up(tiles, matrices, row, row_groups, num_rows, activations, expert=None) -> tuple[jax.Array, jax.Array]:
    """Both products of the same rows, unrounded. `activations()` comes after the weights have been asked for."""
    loaded = [load_groups(tiles, matrix, row, row_groups, num_rows, expert) for matrix in matrices]
    scales = [accumulator_scale(tiles, matrix, expert) for matrix in matrices]
    x = activations()
    gates, ups = (multiply_groups(tiles, part, x) for part in loaded)
    padding = [tiles.zeros()] * (pl.next_power_of_2(row_groups) - row_groups)
    both = tiles.finish([*gates, *padding, *ups, *padding])
    return of_pair(both, 0) * scales[0], of_pair(both, 1) * scales[1]


def silu(x: jax.Array) -> jax.Array:
    """`x * sigmoid(x)`, float32, with an accurate exponential and division."""
    return x * (1 / (1 + jnp.exp(-x)))
