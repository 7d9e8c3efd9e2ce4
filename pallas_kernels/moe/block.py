"""A whole MoE block for one token in one launch: Pallas, Triton lowering.

Residual add, norm, router, top-k, the selected experts, the shared expert and their sum. Every processor has one
program, and all programs meet twice on the way:

    logits      each program adds and normalises the row for itself and computes the logits of a few experts
    -- meet --
    gate, up    each finds the selected experts, and computes 32 activations of one of them or of the shared expert
    -- meet --
    down        each computes 16 rows of the output

What does not depend on the others is asked for before a meeting: the down projections' weights arrive while a program
waits. Launches of their own would ask for them after it, and cost a microsecond each besides.

To meet, programs count up a number in memory and wait until all have. So all of them must run at once: no more programs
than the GPU has processors, and nothing else on it that lasts. Interpreted, where programs run one after another, each
part is a launch of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.dense_gemv.triton import (
    Norm,
    accumulator_scale,
    load_groups,
    multiply_groups,
    normalised_row,
    silu,
    store_rows,
)
from pallas_kernels.moe.selection import row_weights, select_row
from pallas_kernels.warp_tiles import ROW_GROUP, Matrix, Tiles, of_pair

ROWS = 2 * ROW_GROUP  # activations a program


class Experts(NamedTuple):
    """Gate, up and down matrices: of a stack of experts, or of the shared expert."""

    gate: Matrix
    up: Matrix
    down: Matrix


def num_programs(experts: Experts, shared: Experts, top_k: int) -> int:
    """Programs of the launch: as many as the activations or the output take."""
    inner, shared_inner = experts.gate.weight.shape[1], shared.gate.weight.shape[0]
    hidden = experts.down.weight.shape[1]
    return max(pl.cdiv(top_k * inner + shared_inner, ROWS), pl.cdiv(hidden, ROW_GROUP))


def moe_block(
    x, residual, norm_weight, gate, experts, shared, counter, *, top_k, normalise, round_router, norm_eps, num_warps, interpret
):
    """See `pallas_kernels.moe.moe_block`."""
    hidden, num_experts = x.shape[1], gate.shape[0]
    inner, shared_inner = experts.gate.weight.shape[1], shared.gate.weight.shape[0]
    weight_format = "bf16" if experts.gate.scales is None else "nvfp4"
    programs = num_programs(experts, shared, top_k)
    tiles = Tiles(hidden, num_warps, weight_format, 1, interpret)
    lane = dataclasses.replace(tiles, num_columns=inner, num_warps=1)
    groups = max(1, num_warps // pl.next_power_of_2(lane.num_steps))
    down_tiles = dataclasses.replace(lane, num_warps=num_warps, groups=groups)
    shared_tiles = dataclasses.replace(lane, num_columns=shared_inner, num_warps=num_warps)
    leaves, treedef = jax.tree.flatten((x, residual, norm_weight, gate, experts, shared))

    def kernel(*refs, parts):
        x_ref, residual_ref, norm_ref, gate_ref, expert_refs, shared_refs = jax.tree.unflatten(
            treedef, refs[: len(leaves)]
        )
        out_ref, stream_ref, logits_ref, act_ref, counter_ref = refs[len(leaves) + len(scratch) :]
        program = pl.program_id(0)
        norm = Norm(residual_ref, norm_ref, norm_eps, stream_ref)
        router_rows = _router_rows(tiles, gate_ref, program, programs)
        row = normalised_row(tiles, x_ref, norm)
        seen, together = jnp.int32(0), len(parts) > 1
        if 0 in parts:
            _logits(tiles, router_rows, row, program, programs, num_experts, round_router, logits_ref)
            if together:
                seen = _wait(counter_ref, _arrive(counter_ref), programs)
        ids, scores = select_row(logits_ref, num_experts, top_k, seen)
        down_row = program * ROW_GROUP
        half = _Down(down_tiles, shared_tiles, expert_refs, shared_refs, ids, down_row, hidden)
        arrived = None
        if 1 in parts:
            _activations(tiles, row, expert_refs, shared_refs, ids, program, inner, shared_inner, act_ref)
            if together:
                arrived = _arrive(counter_ref)
        # After the arrival, since to arrive is to wait for one's own loads; before the others have arrived, if they fit.
        loaded, weights = half.load(), row_weights(scores, normalise, round_router)
        if arrived is not None:
            seen = _wait(counter_ref, arrived, programs)
        if 2 in parts:
            total = half.multiply(loaded, act_ref, seen, inner, weights)
            end = hidden if hidden != programs * ROW_GROUP else None
            store_rows(down_tiles, out_ref, total, down_row, end, 1)

    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((1, num_experts), jnp.float32),
        jax.ShapeDtypeStruct((1, top_k * inner + shared_inner), jnp.bfloat16),
        jax.ShapeDtypeStruct(counter.shape, counter.dtype),
    ]
    scratch: list[jax.Array] = [counter]

    def launch(parts: tuple[int, ...], given: list[jax.Array]) -> list[jax.Array]:
        aliases = {len(leaves) + i: len(shapes) - len(given) + i for i in range(len(given))}
        return pl.pallas_call(
            lambda *refs: kernel(*refs, parts=parts),
            grid=(programs,),
            out_shape=shapes,
            input_output_aliases=aliases,
            compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
            interpret=interpret,
            name="moe_block",
        )(*leaves, *given)

    if not interpret:
        out, stream, _, _, counter = launch((0, 1, 2), scratch)
        return out, stream, counter
    for part in range(3):
        out, stream, *scratch = launch((part,), scratch)
    return out, stream, counter


def _router_rows(tiles, gate_ref, program, programs) -> list[jax.Array]:
    """The router's weights of the program's experts, float32, held as of `Tiles.row_places`; asked for first."""
    column, inside = tiles.row_places()
    num_experts = gate_ref.shape[0]
    rows = []
    for i in range(pl.cdiv(num_experts, programs)):
        expert = program + i * programs
        fits = inside & (expert < num_experts)
        weight = plt.load(gate_ref.at[expert, column], mask=fits, other=jnp.zeros((), gate_ref.dtype))
        rows.append(weight.astype(jnp.float32))
    return rows


def _logits(tiles, router_rows, row, program, programs, num_experts, round_router, logits_ref) -> None:
    for i, weight in enumerate(router_rows):
        logit = (row.astype(jnp.float32) * weight).sum()
        if round_router:
            logit = logit.astype(jnp.bfloat16).astype(jnp.float32)
        expert = program + i * programs
        plt.store(logits_ref.at[jnp.int32(0), expert], logit, mask=expert < num_experts)


def _activations(tiles, row, experts, shared, ids, program, inner, shared_inner, act_ref) -> None:
    """32 activations of a selected expert, or of the shared one: act [1, top_k * inner + shared_inner]."""
    routed, first = len(ids) * inner, program * ROWS

    @pl.when(first < routed + shared_inner)
    def _():
        expert = ids[0]
        for slot, other in enumerate(ids[1:], 1):
            expert = lax.select(first // inner == slot, other, expert)
        is_routed = first < routed

        def load(matrices, at, num_rows, which=None):
            return [load_groups(tiles, m, at, ROWS // ROW_GROUP, num_rows, which) for m in matrices]

        loaded = lax.cond(
            is_routed,
            lambda: load((experts.gate, experts.up), first % inner, inner, expert),
            lambda: load((shared.gate, shared.up), first - routed, shared_inner),
        )
        pairs = ((experts.gate, shared.gate), (experts.up, shared.up))
        scales = [
            jnp.where(is_routed, accumulator_scale(tiles, own, jnp.maximum(expert, 0)), accumulator_scale(tiles, other))
            for own, other in pairs
        ]
        x = [tiles.spread(tiles.share_row(row, step)) for step in range(tiles.num_steps)]
        sums = [total for part in loaded for total in multiply_groups(tiles, part, x)]
        both = tiles.finish(sums)
        values = []
        for which, scale in enumerate(scales):
            value = of_pair(both, which) * scale
            # The shared expert rounds both halves before the activation, the others do not (spec 4.9 and 4.10).
            rounded = value.astype(jnp.bfloat16).astype(jnp.float32)
            values.append(jnp.where(is_routed, value, rounded))
        store_rows(tiles, act_ref, silu(values[0]) * values[1], first, None, ROWS // ROW_GROUP)


@dataclasses.dataclass(frozen=True)
class _Down:
    """The down projections of one row group: asked for early, multiplied late."""

    tiles: Tiles
    shared_tiles: Tiles
    experts: Any
    shared: Any
    ids: list
    row: Any
    hidden: int

    def passes(self) -> list[list[int]]:
        """The slots that the warps work on at once."""
        groups = self.tiles.groups
        return [list(range(i, i + groups)) for i in range(0, len(self.ids), groups)]

    def load(self) -> tuple:
        bound = self.hidden if self.hidden % ROW_GROUP else None
        slots = [[self.ids[s] if s < len(self.ids) else jnp.int32(-1) for s in slots] for slots in self.passes()]
        routed = [
            [
                tuple(self.tiles.load(self.experts.down, step, self.row + half, bound, ids) for half in (0, 8))
                for step in range(self.tiles.num_steps)
            ]
            for ids in slots
        ]
        shared = load_groups(self.shared_tiles, self.shared.down, self.row, 1, self.hidden)
        scales = [accumulator_scale(self.tiles, self.experts.down, expert) for expert in self.ids]
        return routed, shared, scales, accumulator_scale(self.shared_tiles, self.shared.down)

    def multiply(self, loaded: tuple, act_ref: Any, seen: Any, inner: int, weights: list) -> jax.Array:
        """The block's output of the row group, float32: [*rows, 1], already the sum of two roundings (spec 4.11)."""
        tiles, routed_end = self.tiles, len(self.ids) * inner
        routed, shared, scales, shared_scale = loaded
        sums = []
        for slots, steps in zip(self.passes(), routed, strict=True):
            sums.append(tiles.zeros())
            for step, pair in enumerate(steps):
                x = tiles.load_row(act_ref, step, seen, slots[0] * inner, routed_end)
                sums[-1] = tiles.multiply(*pair, tiles.spread(x), sums[-1])
        wide = self.shared_tiles
        x = [wide.spread(wide.load_row(act_ref, step, seen, routed_end, act_ref.shape[1])) for step in range(wide.num_steps)]
        shared_out = wide.finish(multiply_groups(wide, shared, x)) * shared_scale
        total = self._weighted(tiles.finish(sums), scales, weights)
        routed_out, shared_out = (part.astype(jnp.bfloat16).astype(jnp.float32) for part in (total, shared_out))
        return routed_out + shared_out

    def _weighted(self, sums: jax.Array, scales: list, weights: list) -> jax.Array:
        """The experts' outputs [*groups, *rows, passes], rounded, weighted and summed: [*rows, 1]."""
        slot = lax.broadcasted_iota(jnp.int32, sums.shape, sums.ndim - 1) * self.tiles.groups
        if self.tiles.groups > 1:
            slot = slot + lax.broadcasted_iota(jnp.int32, sums.shape, 0)
        scale, weight = jnp.zeros(sums.shape, jnp.float32), jnp.zeros(sums.shape, jnp.float32)
        for i in range(len(self.ids)):
            scale, weight = jnp.where(slot == i, scales[i], scale), jnp.where(slot == i, weights[i], weight)
        rows = (sums * scale).astype(jnp.bfloat16).astype(jnp.float32)
        rows = (weight * rows).sum(axis=-1)
        return (rows.sum(axis=0) if self.tiles.groups > 1 else rows)[..., None]


def _arrive(counter_ref: Any) -> jax.Array:
    """Counts this program in, and tells how many were before it. What it has written is seen by who counts later."""
    plt.debug_barrier()  # what the program's other threads wrote comes before what the first of them counts
    return plt.atomic_add(counter_ref, (jnp.int32(0),), jnp.int32(1))


def _wait(counter_ref: Any, arrived: jax.Array, programs: int) -> jax.Array:
    """Waits until every program of the launch has arrived. Returns 0: what is read at a place that depends on it is read
    after that, and is what the others wrote before."""
    # Every launch counts `programs` up at each meeting, so the next multiple is the end of this one.
    target = (arrived // programs + 1) * programs

    def look(_: jax.Array) -> jax.Array:
        return plt.atomic_add(counter_ref, (jnp.int32(0),), jnp.int32(0))

    return jnp.minimum(lax.while_loop(lambda seen: seen < target, look, arrived + 1), 0)
