"""The MoE block of a decode step in two launches, three for several tokens: Pallas, Triton lowering.

1. `gate_up`: each program takes one slot (a distinct expert of the step) or a part of the shared expert, and computes
   silu(gate) * up for 16 rows or more and all tokens. With one token it finds its expert in the router's logits by
   itself; for several tokens another launch does that once.
2. `down`: each program computes 16 rows of the output: all experts' down projections, weighted and added to the shared
   expert's. Warps work on several experts at once.

Weights of experts that nobody selected are not read; an expert that several tokens selected is read once. A token that
did not select a slot's expert is computed along (the tensor core has eight columns anyhow) and left out of the sum.

Roofline: bytes of the selected experts, for one token of Flint in NVFP4 7.1 + 2.4 MB and 3.5 + 1.2 MB.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.dense_gemv.triton import (
    accumulator_scale,
    gate_and_up,
    load_groups,
    load_pair,
    multiply_groups,
    silu,
    store_rows,
)
from pallas_kernels.moe.selection import WARP, routing_weights, select, select_row, slots
from pallas_kernels.warp_tiles import ROW_GROUP, Tiles


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Tunable sizes: row groups (of 16) and warps a program of `gate_up`; warps of `down`, and how many passes over its
    warps' experts it has in flight."""

    row_groups: int = 1
    num_warps: int = 8
    down_warps: int = 8
    down_passes: int = 4


def gate_up(x, logits, experts, shared, *, top_k, normalise, round_weights, valid, blocks, interpret):
    """See `pallas_kernels.moe.gate_up`. experts, shared: (gate, up) matrices."""
    num_tokens, hidden = x.shape
    num_experts, inner = experts[0].weight.shape[:2]
    shared_inner = shared[0].weight.shape[0]
    num_slots = min(num_tokens * top_k, num_experts)
    tiles = Tiles(hidden, blocks.num_warps, experts[0].weight_format, num_tokens, interpret)
    block_rows = blocks.row_groups * ROW_GROUP
    slot_programs, shared_programs = pl.cdiv(inner, block_rows), pl.cdiv(shared_inner, block_rows)
    routing = dict(top_k=top_k, normalise=normalise, round_weights=round_weights)
    # One token's selection is quick enough for every program to do it; several tokens' is a launch of its own.
    selected = None if num_tokens == 1 else _select(logits, valid, num_slots, **routing, interpret=interpret)
    leaves, treedef = jax.tree.flatten((x, logits if selected is None else selected[0], experts, shared))

    def kernel(*refs):
        x_ref, slots_ref, expert_refs, shared_refs = jax.tree.unflatten(treedef, refs[: len(leaves)])
        out_ref, shared_ref, *selected_refs = refs[len(leaves) :]
        program = pl.program_id(0)

        def activations():
            return [tiles.spread(tiles.load_tokens(x_ref, step)) for step in range(tiles.num_steps)]

        @pl.when(program < num_slots * slot_programs)
        def _routed():
            slot, row = program // slot_programs, program % slot_programs * block_rows
            if selected is None:
                first_of_slot = program % slot_programs == 0
                expert = _select_one(slots_ref, slot, first_of_slot, num_experts, selected_refs, **routing)
            else:
                expert = slots_ref[slot]

            @pl.when(expert >= 0)
            def _compute():
                gate, up = gate_and_up(tiles, expert_refs, row, blocks.row_groups, inner, activations, expert)
                end = inner if inner % block_rows else None
                store_rows(tiles, out_ref, silu(gate) * up, row, end, blocks.row_groups, (slot,))

        @pl.when(program >= num_slots * slot_programs)
        def _shared():
            row = (program - num_slots * slot_programs) * block_rows
            pair = gate_and_up(tiles, shared_refs, row, blocks.row_groups, shared_inner, activations)
            gate, up = (value.astype(jnp.bfloat16).astype(jnp.float32) for value in pair)
            end = shared_inner if shared_inner % block_rows else None
            store_rows(tiles, shared_ref, silu(gate) * up, row, end, blocks.row_groups)

    out = pl.pallas_call(
        kernel,
        grid=(num_slots * slot_programs + shared_programs,),
        out_shape=[
            jax.ShapeDtypeStruct((num_slots, num_tokens, inner), jnp.bfloat16),
            jax.ShapeDtypeStruct((num_tokens, shared_inner), jnp.bfloat16),
            *(_selected_shapes(num_slots, num_tokens) if selected is None else ()),
        ],
        compiler_params=plt.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
        interpret=interpret,
        name="moe_gate_up",
    )(*leaves)
    return [*out, *(selected or ())]


def _selected_shapes(num_slots: int, num_tokens: int) -> list[jax.ShapeDtypeStruct]:
    """The slots' experts, their number, and the tokens' weights."""
    return [
        jax.ShapeDtypeStruct((num_slots,), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.ShapeDtypeStruct((num_slots, num_tokens), jnp.float32),
    ]


def _select_one(logits_ref, slot, record, num_experts, selected_refs, *, top_k, normalise, round_weights):
    """One token's expert of a slot, which the program that `record` is set for notes with its weight."""
    ids_ref, count_ref, weights_ref = selected_refs
    experts, scores = select_row(logits_ref, num_experts, top_k)
    expert = experts[0]
    for other, candidate in enumerate(experts[1:], 1):
        expert = lax.select(slot == other, candidate, expert)

    @pl.when(record)
    def _():
        weights = routing_weights(scores, functools.reduce(jnp.add, scores), normalise, round_weights)
        weight = weights[0]
        for other, candidate in enumerate(weights[1:], 1):
            weight = lax.select(slot == other, candidate, weight)
        plt.store(ids_ref.at[slot], expert)
        plt.store(weights_ref.at[slot, jnp.int32(0)], weight)
        plt.store(count_ref.at[jnp.int32(0)], jnp.int32(top_k))

    return expert


def _select(logits, valid, num_slots, *, top_k, normalise, round_weights, interpret):
    """Several tokens' slots, weights and count, in one program."""
    num_tokens, num_experts = logits.shape

    def kernel(logits_ref, *refs):
        valid_ref, (ids_ref, count_ref, weights_ref) = None if valid is None else refs[0], refs[-3:]
        selection = select(logits_ref, valid_ref, num_tokens, num_experts, top_k)
        used, places, count = slots(selection)
        lane = lax.broadcasted_iota(jnp.int32, (WARP,), 0)
        token = lax.broadcasted_iota(jnp.int32, selection.scores[0].shape, 0)
        weights = routing_weights(selection.scores, selection.total[:, None], normalise, round_weights)
        for i, (here, place, weight) in enumerate(zip(used, places, weights, strict=True)):
            plt.store(ids_ref.at[place], i * WARP + lane, mask=here)
            at = jnp.broadcast_to(place[None], token.shape)
            plt.store(weights_ref.at[at, token], weight, mask=here[None] & (token < num_tokens))
        shape = (pl.next_power_of_2(num_slots), token.shape[0])
        rest, token = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
        empty = (rest >= count) & (rest < num_slots)
        plt.store(ids_ref.at[rest], jnp.full(shape, -1), mask=empty)
        plt.store(weights_ref.at[rest, token], jnp.zeros(shape), mask=empty & (token < num_tokens))
        plt.store(count_ref.at[jnp.int32(0)], count)

    return pl.pallas_call(
        kernel,
        grid=(1,),
        out_shape=_selected_shapes(num_slots, num_tokens),
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="moe_select",
    )(*(logits,) if valid is None else (logits, valid))


def down(activations, shared_activations, ids, count, weights, experts, shared, *, blocks, interpret):
    """See `pallas_kernels.moe.down`. experts, shared: one matrix each."""
    num_slots, num_tokens, inner = activations.shape
    hidden = experts.weight.shape[1]
    # An expert's columns take as many warps as they fill, and a pass as many experts as there are warps for.
    lane = Tiles(inner, 1, experts.weight_format, num_tokens, interpret)
    groups = max(1, blocks.down_warps // pl.next_power_of_2(lane.num_steps))
    tiles = dataclasses.replace(lane, num_warps=blocks.down_warps, groups=groups)
    shared_tiles = dataclasses.replace(lane, num_columns=shared_activations.shape[1], num_warps=blocks.down_warps)
    passes = min(blocks.down_passes, pl.cdiv(num_slots, groups))
    leaves, treedef = jax.tree.flatten((activations, shared_activations, ids, count, weights, experts, shared))

    def kernel(*refs):
        x_ref, shared_x_ref, ids_ref, count_ref, weights_ref, expert_ref, shared_ref = jax.tree.unflatten(
            treedef, refs[:-1]
        )
        row = pl.program_id(0) * ROW_GROUP
        bound = hidden if hidden % ROW_GROUP else None
        shared_loaded = load_groups(shared_tiles, shared_ref, row, 1, hidden)

        def load(first):
            """Slots first .. first + passes * groups - 1: who they are, and their weights, all asked for at once."""
            chunks = [[_slot(first + p * groups + i, num_slots, ids_ref) for i in range(groups)] for p in range(passes)]
            return chunks, [
                [
                    load_pair(tiles, expert_ref, step, row, bound, [expert for _, expert in chunk])
                    for step in range(tiles.num_steps)
                ]
                for chunk in chunks
            ]

        def multiply(chunks, loaded):
            sums = []
            for chunk, steps in zip(chunks, loaded, strict=True):
                sums.append(tiles.zeros())
                for step, (upper, lower) in enumerate(steps):
                    x = tiles.load_tokens(x_ref, step, [slot for slot, _ in chunk])
                    sums[-1] = tiles.multiply(upper, lower, tiles.spread(x), sums[-1])
            return _weighted(tiles, tiles.finish(sums), chunks, expert_ref, weights_ref)

        at_once = passes * groups
        if at_once >= num_slots:
            chunks, loaded = load(jnp.int32(0))
            total = multiply(chunks, loaded)
        else:

            def turn(i, carry):
                total, *now = carry
                following = load((i + 1) * at_once)  # under way while these are multiplied
                return total + multiply(*now), *following

            nothing = jnp.zeros((8, 2, 1) if tiles.single else (8, 4, 4, 1), jnp.float32)
            start = (nothing, *load(jnp.int32(0)))
            total, *_ = lax.fori_loop(0, pl.cdiv(count_ref[0], at_once), turn, start)
        shared_x = [
            shared_tiles.spread(shared_tiles.load_tokens(shared_x_ref, step)) for step in range(shared_tiles.num_steps)
        ]
        shared_out = shared_tiles.finish(multiply_groups(shared_tiles, shared_loaded, shared_x))
        parts = [total, shared_out * accumulator_scale(shared_tiles, shared_ref)]
        routed, shared_out = (part.astype(jnp.bfloat16).astype(jnp.float32) for part in parts)
        store_rows(tiles, refs[-1], routed + shared_out, row, bound, 1)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(hidden, ROW_GROUP),),
        out_shape=jax.ShapeDtypeStruct((num_tokens, hidden), jnp.bfloat16),
        compiler_params=plt.CompilerParams(num_warps=blocks.down_warps, num_stages=1),
        interpret=interpret,
        name="moe_down",
    )(*leaves)


def _slot(slot, num_slots, ids_ref):
    """A slot and its expert; -1 for both where there is none."""
    inside = slot < num_slots
    expert = plt.load(ids_ref.at[slot], mask=inside, other=-1)
    return lax.select(expert >= 0, slot, jnp.int32(-1)), expert


def _weighted(tiles, sums, chunks, expert_ref, weights_ref):
    """The outputs of several passes over groups, [*groups, *rows, passes], rounded, weighted and summed: [*rows, 1]."""
    _, token = tiles.places(sums.shape)
    which = lax.broadcasted_iota(jnp.int32, sums.shape, sums.ndim - 1) * tiles.groups  # the slot among the chunks'
    if tiles.groups > 1:
        which = which + lax.broadcasted_iota(jnp.int32, sums.shape, 0)
    slot, scale = jnp.full(sums.shape, -1, jnp.int32), jnp.zeros(sums.shape, jnp.float32)
    for i, (its_slot, expert) in enumerate(pair for chunk in chunks for pair in chunk):
        slot = jnp.where(which == i, its_slot, slot)
        scale = jnp.where(which == i, accumulator_scale(tiles, expert_ref, jnp.maximum(expert, 0)), scale)
    fits = (slot >= 0) & (token < tiles.num_tokens)
    weight = plt.load(weights_ref.at[jnp.maximum(slot, 0), token], mask=fits, other=0.0)
    rows = (sums * scale).astype(jnp.bfloat16).astype(jnp.float32)
    # A token that did not select the expert has weight 0, and perhaps an output that is no number.
    rows = jnp.where(weight > 0, weight * rows, 0.0).sum(axis=-1)
    return (rows.sum(axis=0) if tiles.groups > 1 else rows)[..., None]
