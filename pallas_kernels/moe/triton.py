"""The MoE block of a decode step in two launches, three for several tokens: Pallas, Triton lowering.

1. `gate_up`, here: each program takes one slot (a distinct expert of the step) or a part of the shared expert, and
   computes silu(gate) * up for 16 rows or so and all tokens. With one token it finds its expert in the router's logits
   by itself; for several tokens another launch does that once.
2. `pallas_kernels.moe.down`: the second halves, and their sum.

Weights of experts that nobody selected are not read; an expert that several tokens selected is read once, and
multiplied with one of them after the other (`pallas_kernels.moe.tokens`): most of a step's experts have one or two.

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

from pallas_kernels.dense_gemv.triton import Norm, ask, gate_and_up, load_gate_up, rounded, silu, store_rows
from pallas_kernels.moe.blocks import Blocks
from pallas_kernels.moe.selection import WARP, routing_weights, select, select_row, slots
from pallas_kernels.moe.tokens import for_each_token, tokens_of
from pallas_kernels.warp_tiles import ROW_GROUP, Activations, Tiles


def gate_up(x, logits, experts, shared, *, top_k, normalise, round_weights, valid, blocks: Blocks, interpret):
    """See `pallas_kernels.moe.gate_up`. experts, shared: (gate, up) matrices."""
    num_tokens, hidden = x.shape
    num_experts, inner = experts[0].weight.shape[:2]
    shared_inner = shared[0].weight.shape[0]
    num_slots = min(num_tokens * top_k, num_experts)
    tiles = Tiles(hidden, blocks.num_warps, experts[0].weight_format, num_tokens, interpret)
    one = dataclasses.replace(tiles, num_tokens=1)
    # All tokens at once take more registers, which all programs of a launch have.
    row_groups, shared_groups = blocks.row_groups, blocks.row_groups if num_tokens == 1 else 1
    block_rows, shared_rows = row_groups * ROW_GROUP, shared_groups * ROW_GROUP
    slot_programs, shared_programs = pl.cdiv(inner, block_rows), pl.cdiv(shared_inner, shared_rows)
    routing = dict(top_k=top_k, normalise=normalise, round_weights=round_weights)
    # One token's selection is quick enough for every program to do it; several tokens' is a launch of its own.
    selected = None if num_tokens == 1 else _select(logits, valid, num_slots, **routing, interpret=interpret)
    choice = logits if selected is None else (selected[0], selected[2])
    leaves, treedef = jax.tree.flatten((x, x[:, None], choice, experts, shared))

    def kernel(*refs):
        x_ref, rows_ref, choice_ref, expert_refs, shared_refs = jax.tree.unflatten(treedef, refs[: len(leaves)])
        out_ref, shared_ref, *selected_refs = refs[len(leaves) :]
        program = pl.program_id(0)
        slot, row = program // slot_programs, program % slot_programs * block_rows
        end = inner if inner % block_rows else None
        shared_end = shared_inner if shared_inner % shared_rows else None

        def ask_row(token) -> list[Activations]:
            return [one.load_tokens(rows_ref, step, token) for step in range(one.num_steps)]

        def for_one_token():
            """Experts and the shared one by the same instructions, of which a program reads each for the first time."""
            is_shared = program >= num_slots * slot_programs
            shared_row = (program - num_slots * slot_programs) * block_rows
            x = ask_row(0)

            def select():
                return _select_one(choice_ref, slot, row == 0, num_experts, selected_refs, **routing)

            expert = lax.cond(is_shared, lambda: slot, select)
            pair = lax.cond(
                is_shared,
                lambda: load_gate_up(one, shared_refs, shared_row, row_groups, shared_inner),
                lambda: load_gate_up(one, expert_refs, row, row_groups, inner, expert),
            )
            empty = one.fence()
            gate, up = gate_and_up(one, pair, [one.spread(of_step) for of_step in x], empty)
            gate, up = (jnp.where(is_shared, rounded(value), value) for value in (gate, up))
            out = silu(gate) * up
            pl.when(is_shared)(lambda: store_rows(one, shared_ref, out, shared_row, shared_end, row_groups))
            pl.when(~is_shared)(lambda: store_rows(one, out_ref, out, row, end, row_groups, (slot,)))

        def for_several_tokens():
            def multiply(pair, x, empty, token):
                gate, up = gate_and_up(one, pair, [one.spread(of_step) for of_step in x], empty)
                store_rows(one, out_ref, silu(gate) * up, row, end, row_groups, (slot,), token)

            @pl.when(program < num_slots * slot_programs)
            def _routed():
                ids_ref, weights_ref = choice_ref
                expert, tokens = ids_ref[slot], tokens_of(weights_ref, slot)

                @pl.when(expert >= 0)
                def _():
                    pair = load_gate_up(one, expert_refs, row, row_groups, inner, expert)
                    for_each_token(one, tokens, ask_row, functools.partial(multiply, pair))

            @pl.when(program >= num_slots * slot_programs)
            def _shared():
                row = (program - num_slots * slot_programs) * shared_rows
                x, pair = ask(tiles, x_ref, Norm()), load_gate_up(tiles, shared_refs, row, shared_groups, shared_inner)
                gate, up = map(rounded, gate_and_up(tiles, pair, x(), tiles.fence()))
                store_rows(tiles, shared_ref, silu(gate) * up, row, shared_end, shared_groups)

        for_one_token() if selected is None else for_several_tokens()

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
        # A total that is no number is so for the chosen alone.
        weights = [jnp.where(here, w, 0.0) for here, w in zip(selection.chosen, weights, strict=True)]
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
