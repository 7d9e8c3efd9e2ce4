"""The second half of the MoE block of a decode step: down projections, weighted sum, shared expert. Pallas, Triton
lowering.

One token: a program computes some rows of the output. Its warps work on all experts at once, the shared one too, and
meet at the end.

Several tokens have many experts between them, each for a token or two. So a program takes one slot (a distinct expert,
or the shared one) and some rows, and leaves the weighted outputs of its tokens in memory. Whoever of a
block of rows comes last adds them up, in the order of the slots, and sets the block's counter back: no program waits
for another, and the order of sums does not depend on who was last. Few programs that do all slots one after another
wait for memory at each.
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
    Loaded,
    Norm,
    accumulator_scales,
    ask,
    load_groups,
    load_pair,
    multiply_groups,
    rounded,
    scaled,
    store_rows,
)
from pallas_kernels.moe.blocks import Blocks
from pallas_kernels.moe.tokens import for_each_token, tokens_of
from pallas_kernels.warp_tiles import ROW_GROUP, Activations, Tiles


def down(
    activations,
    shared_activations,
    ids,
    count,
    weights,
    counters,
    experts,
    shared,
    *,
    top_k,
    blocks: Blocks,
    interpret,
):
    """See `pallas_kernels.moe.down`."""
    num_tokens, inner = activations.shape[1:]
    lane = Tiles(inner, 1, experts.weight_format, num_tokens, interpret)
    group_warps = pl.next_power_of_2(lane.num_steps)  # that an expert's columns fill
    if num_tokens == 1 and group_warps <= blocks.down_warps:
        arguments = activations, shared_activations, ids, weights, experts, shared
        tiles = dataclasses.replace(lane, num_warps=blocks.down_warps, groups=blocks.down_warps // group_warps)
        return _of_one_token(tiles, blocks.down_row_groups, *arguments), counters
    others = ids, count, weights, experts, shared, counters
    tiles = dataclasses.replace(lane, num_warps=min(group_warps, blocks.down_warps))
    return _of_several_tokens(tiles, blocks.down_row_groups, top_k, activations, shared_activations, others)


def _of_one_token(tiles: Tiles, row_groups, activations, shared_activations, ids, weights, experts, shared):
    """Groups of warps take an expert each, in several passes if there are fewer groups; the shared expert's columns
    take the warps that are left."""
    num_slots, hidden, shared_inner = len(activations), experts.weight.shape[1], shared_activations.shape[1]
    num_warps, groups = tiles.num_warps, tiles.groups
    line = tiles.step_columns // (num_warps // groups)
    passes = pl.cdiv(num_slots * (num_warps // groups) + pl.cdiv(shared_inner, line), num_warps)
    # Of a pass, the warp that has the shared expert's first columns: it may be one of another pass.
    firsts = [(num_slots - p * groups) * (num_warps // groups) for p in range(passes)]
    block_rows = row_groups * ROW_GROUP
    bound = hidden if hidden % block_rows else None
    leaves, treedef = jax.tree.flatten((activations, shared_activations, ids, weights, experts, shared))

    def kernel(*refs):
        x_ref, shared_x_ref, ids_ref, weights_ref, expert_ref, shared_ref = jax.tree.unflatten(treedef, refs[:-1])
        row = pl.program_id(0) * block_rows
        ids = [ids_ref[slot] for slot in range(num_slots)]

        def load(tiles: Tiles, matrix, x_ref, ids, slots) -> tuple[Loaded, Activations]:
            rows = range(row_groups)
            pairs = [load_pair(tiles, matrix, 0, row + i * ROW_GROUP, bound, ids) for i in rows]
            return [pairs], tiles.load_tokens(x_ref, 0, slots)

        def load_pass(p: int) -> list:
            """Some experts, from warp `first` on the shared one."""
            slots = [slot if slot < num_slots else -1 for slot in range(p * groups, (p + 1) * groups)]
            theirs = [ids[slot] if slot >= 0 else jnp.int32(-1) for slot in slots]
            parts = []
            if firsts[p] > 0:
                parts.append(load(tiles, expert_ref, x_ref, theirs, [jnp.int32(slot) for slot in slots]))
            if firsts[p] < num_warps:
                side = dataclasses.replace(tiles, num_columns=shared_inner, groups=1, first_warp=firsts[p])
                parts.append(load(side, shared_ref, shared_x_ref, None, None))
            return parts

        def of_warps(first: int, parts: list) -> tuple[Loaded, Activations]:
            if len(parts) == 1:
                return parts[0]
            return jax.tree.map(lambda a, b: jnp.where(tiles.iota(0, a.shape[-1]) < first, a, b), *parts)

        loaded = [load_pass(p) for p in range(passes)]
        scales = [accumulator_scales(tiles, [expert_ref], expert) for expert in ids]
        shares = [weights_ref[slot, 0] for slot in range(num_slots)]
        shared_scale = accumulator_scales(tiles, [shared_ref])
        empty = tiles.fence()
        sums = []
        for first, parts in zip(firsts, loaded, strict=True):
            weights, x = of_warps(first, parts)
            sums.append(multiply_groups(tiles, weights, [tiles.spread(x)], empty))
        sums += [[[empty]] * row_groups] * (pl.next_power_of_2(passes) - passes)
        totals = tiles.finish([of_pass[i] for i in range(row_groups) for of_pass in sums])
        routed, rest = _weighted(tiles, totals, len(sums), scales, shares)
        store_rows(tiles, refs[-1], rounded(routed) + rounded(scaled(rest, shared_scale)), row, bound, row_groups)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(hidden, block_rows),),
        out_shape=jax.ShapeDtypeStruct((1, hidden), jnp.bfloat16),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=tiles.interpret,
        name="moe_down",
    )(*leaves)


def _weighted(tiles: Tiles, totals, passes: int, scales: list, shares: list) -> tuple[jax.Array, jax.Array]:
    """Of finished sums [*groups, *rows, row groups * passes] the experts' rounded, weighted and added, and the shared
    expert's added: [*rows, row groups] each."""
    if tiles.groups == 1:
        totals = totals[None]
    group, one_pass = (lax.broadcasted_iota(jnp.int32, totals.shape, axis) for axis in (0, totals.ndim - 1))
    slot = one_pass % passes * tiles.groups + group

    def of_slot(values: list) -> jax.Array:
        return functools.reduce(
            lambda found, i: jnp.where(slot == i, values[i], found), range(len(values)), jnp.zeros(totals.shape)
        )

    outputs = rounded(scaled(totals, [of_slot([scale for [scale] in scales])] if scales[0] else []))
    experts = slot < len(shares)

    def added(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, passes).sum(axis=-1).sum(axis=0)

    return added(jnp.where(experts, of_slot(shares) * outputs, 0.0)), added(jnp.where(experts, 0.0, totals))


def _of_several_tokens(tiles: Tiles, row_groups, top_k, activations, shared_activations, others):
    """Partial outputs go to float32 [1 + top_k, tokens, hidden]: the shared expert's, then each token's experts' in the
    order of their slots. others: ids, count, weights, both matrices, counters."""
    *_, experts, _, counters = others
    (num_slots, num_tokens, _), hidden = activations.shape, experts.weight.shape[1]
    block_rows = row_groups * ROW_GROUP
    num_blocks = pl.cdiv(hidden, block_rows)
    bound = hidden if hidden % block_rows else None
    shared_tiles = dataclasses.replace(tiles, num_columns=shared_activations.shape[1])
    one = dataclasses.replace(tiles, num_tokens=1)
    rows = activations.reshape(num_slots * num_tokens, 1, -1)
    leaves, treedef = jax.tree.flatten((rows, shared_activations, *others))

    def kernel(*refs):
        x_ref, shared_x_ref, ids_ref, count_ref, weights_ref, expert_ref, shared_ref, _ = jax.tree.unflatten(
            treedef, refs[:-3]
        )
        out_ref, counters_ref, partial_ref = refs[-3:]
        part, block = pl.program_id(0) // num_blocks, pl.program_id(0) % num_blocks
        row, slot, parts = block * block_rows, part - row_groups, row_groups + count_ref[0]

        def add_expert():
            expert, tokens = ids_ref[slot], tokens_of(weights_ref, slot)
            loaded = load_groups(one, expert_ref, row, row_groups, hidden, expert)
            scales = accumulator_scales(one, [expert_ref], expert)

            def ask_token(token):
                slots = lax.iota(jnp.int32, pl.next_power_of_2(num_slots))
                before = plt.load(weights_ref.at[slots, token], mask=slots < slot, other=0.0)
                x = [one.load_tokens(x_ref, step, slot * num_tokens + token) for step in range(one.num_steps)]
                return x, before, weights_ref[slot, token]

            def compute(asked, empty, token):
                x, before, share = asked
                sums = one.finish(multiply_groups(one, loaded, [one.spread(of_step) for of_step in x], empty))
                index = 1 + (before != 0).astype(jnp.int32).sum()
                store_rows(
                    one, partial_ref, share * rounded(scaled(sums, scales)), row, bound, row_groups, (index,), token
                )

            for_each_token(one, tokens, ask_token, compute)

        def add_shared():
            """One row group: all tokens at once take more registers, which all programs of a launch have."""
            first = row + part * ROW_GROUP
            end = bound or (hidden if hidden % ROW_GROUP else None)
            steps = range(shared_tiles.num_steps)
            loaded = [[load_pair(shared_tiles, shared_ref, step, first, end, None)] for step in steps]
            scales, activations = accumulator_scales(tiles, [shared_ref]), ask(shared_tiles, shared_x_ref, Norm())
            sums = tiles.finish(multiply_groups(shared_tiles, loaded, activations(), tiles.fence()))
            store_rows(tiles, partial_ref, rounded(scaled(sums, scales)), first, end, 1, (0,))

        def add_up():
            """A token that is idle selects no expert."""
            shape = (pl.next_power_of_2(num_tokens), pl.next_power_of_2(block_rows))
            token, place = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
            slots, tokens = (
                lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(num_slots), shape[0]), axis) for axis in range(2)
            )
            fits = (token < num_tokens) & (place < block_rows) & (row + place < hidden)
            values = [plt.load(partial_ref.at[i, token, row + place], mask=fits, other=0.0) for i in range(1 + top_k)]
            exist = (slots < num_slots) & (tokens < num_tokens)
            shares = plt.load(weights_ref.at[slots, tokens], mask=exist, other=0.0)
            selected = (shares != 0).astype(jnp.int32).sum(axis=0)[:, None]
            routed = functools.reduce(jnp.add, [jnp.where(i < selected, x, 0.0) for i, x in enumerate(values[1:])])
            plt.store(out_ref.at[token, row + place], (rounded(routed) + values[0]).astype(jnp.bfloat16), mask=fits)

        @pl.when(part < parts)
        def _():
            lax.cond(part >= row_groups, add_expert, add_shared)
            if not tiles.interpret:
                plt.debug_barrier()  # every thread has stored before one of them counts
            arrived = plt.atomic_add(counters_ref, (block,), jnp.int32(1))

            @pl.when(arrived == parts - 1)
            def _():
                counters_ref[block] = 0
                add_up()

    out, counters, _ = pl.pallas_call(
        kernel,
        grid=((row_groups + num_slots) * num_blocks,),
        out_shape=(
            jax.ShapeDtypeStruct((num_tokens, hidden), jnp.bfloat16),
            jax.ShapeDtypeStruct(counters.shape, counters.dtype),
            jax.ShapeDtypeStruct((1 + top_k, num_tokens, hidden), jnp.float32),
        ),
        input_output_aliases={len(leaves) - 1: 1},
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=tiles.interpret,
        name="moe_down",
    )(*leaves)
    return out, counters
