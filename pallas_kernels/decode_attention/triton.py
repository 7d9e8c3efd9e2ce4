"""Decode attention for one new token a row, Pallas with the Triton lowering: one kernel, grid (row, kv head, part).

Part 0 is the new token: its norm and RoPE, its page, its share of the attention. So nothing that is read is written by
the same launch, whatever the order of programs. Each of the others takes a contiguous run of tiles of `block_keys` keys
before the new token, or ends at once if there are fewer tiles than programs:

* Every program normalises and rotates its kv head's queries: a few KiB from L2, cheaper than a kernel of their own.
* Keys are on M and heads on N (8, the least there is): S^T = K q^T and O^T = V^T P^T spend little on padding.
* Loads of K and V are masked by row: keys outside the window, pages that do not exist and the slot that is being
  written are never read. They arrive as zeros, through cp.async, `num_stages - 1` tiles ahead.
* l is summed by key lane and reduced once at the end: one reduction over warps a tile (the maximum), not two.

Then it stores its part and counts up. Whoever comes last merges the parts and adds the sink, and sets the counter back:
no program waits for another, and the order of sums does not depend on who was last. Many parts are merged in groups
first, each by the last of its own, for what one processor reads from L2 takes long: 4 KiB a part.

Roofline: 4 * head_dim bytes a key and kv head, 210 MB at 102,400 tokens of Flint: 46 us at 4.5 TB/s, against 3.4 GFLOP
of matrix work. A sliding layer (1 MB) is all latency: position and page number, then keys and values, for which the
queries are made ready meanwhile; then store, count, and read the parts.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.decode_attention.schedule import MIN_HEADS, PAGE_SIZE, Schedule, merge_groups

LOG2_E = math.log2(math.e)
WARP = 32


class Partial(NamedTuple):
    """Attention over parts of the keys, float32: the new token (slot 0), each split that has keys (from slot 1) and, if
    `merge_groups` makes several, each group of these (from slot num_splits + 1). Other slots are not written.

    `o` [batch, slots, num_heads, head_dim] is the weighted mean of values, `lse` [batch, slots, num_heads] the base-2
    logarithm of the sum of weights, -inf without keys.
    """

    o: jax.Array
    lse: jax.Array


def attention(
    qkv: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    rope: tuple[jax.Array, jax.Array] | None,
    sinks: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    counters: jax.Array,
    *,
    window: int | None,
    eps: float,
    schedule: Schedule,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Partial]:
    """Arguments and results as of `decode_attention`, and the partials that the kernel left behind."""
    batch, width = qkv.shape
    kv_heads, head_dim = k_pool.shape[1], k_pool.shape[3]
    heads, half, parts = width // head_dim - 2 * kv_heads, head_dim // 2, schedule.num_splits + 1
    groups, _ = merge_groups(parts)
    slots = parts if groups == 1 else parts + groups
    inputs = (
        positions,
        valid,
        table,
        qkv.reshape(batch, -1, 2, half),
        q_norm.reshape(2, half),
        k_norm.reshape(2, half),
        sinks,
        *(x.reshape(batch, 1, half) for x in rope or ()),
        k_pool,
        v_pool,
        counters,
    )
    kernel = functools.partial(
        _kernel, rotary=rope is not None, window=window, eps=eps, schedule=schedule, interpret=interpret
    )
    out, *updated, o, lse = pl.pallas_call(
        kernel,
        grid=(batch, kv_heads, parts),
        out_shape=(
            jax.ShapeDtypeStruct((batch, heads, head_dim), qkv.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_pool, v_pool, counters)),
            jax.ShapeDtypeStruct((batch, slots, heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, slots, heads), jnp.float32),
        ),
        input_output_aliases={len(inputs) - i: 4 - i for i in (3, 2, 1)},
        compiler_params=plt.CompilerParams(num_warps=schedule.num_warps, num_stages=schedule.num_stages),
        interpret=interpret,
        name="decode_attention",
    )(*inputs)
    return out.reshape(batch, heads * head_dim), *updated, Partial(o, lse)


def _kernel(*refs, rotary: bool, window: int | None, eps: float, schedule: Schedule, interpret: bool):
    positions, valid, table, qkv, q_norm, k_norm, sinks, *refs = refs
    rope, refs = (refs[:2], refs[2:]) if rotary else (None, refs)
    k_pool, v_pool, _, out, k_out, v_out, counters, o_out, lse_out = refs
    row, kv_head, part = (pl.program_id(axis) for axis in range(3))
    heads, head_dim = out.shape[1:]
    num_pages, kv_heads = k_pool.shape[:2]
    group, half, scale = heads // kv_heads, head_dim // 2, head_dim**-0.5 * LOG2_E
    dims = lax.iota(jnp.int32, head_dim)[None]
    round_to = functools.partial(_rounded, dtype=qkv.dtype, interpret=interpret)

    # An idle row's position may be anything.
    position, active = jnp.maximum(positions[row], 0), valid[row].astype(jnp.bool)
    first_key, start, tiles = _tiles(position, active, window, schedule.block_keys)
    splits = jnp.minimum(tiles, schedule.num_splits)
    # The group's heads, padded by repeating the last one: equal results, stored in one place.
    lanes = lax.iota(jnp.int32, max(MIN_HEADS, pl.next_power_of_2(group)))
    own = kv_head * group + jnp.minimum(lanes, group - 1)
    q = _load_heads(qkv, row, own, q_norm, rope)
    place_of = _page_table(table, row)

    def store(slot, lse, o):
        """lse [heads] and o [heads, head_dim] of one part."""
        lse_out[row, slot, own], o_out[row, slot, own[:, None], dims] = lse, o

    def attend_to_tiles():
        # A tile each, or even shares.
        shares = (jnp.where(tiles > splits, lax.div(tiles * i, schedule.num_splits), i) for i in (part - 1, part))
        first, last = (start + share for share in shares)
        tile = functools.partial(_load_tile, k_pool, v_pool, kv_head, first_key, position, schedule.block_keys)
        first_places = _places(place_of, first, schedule.block_keys)
        if not interpret:
            plt.debug_barrier()  # or the compiler requests the page numbers after it has waited for the queries
        attend = functools.partial(_attend, _norm_and_rotate(q, eps, round_to), scale, round_to)

        # A page's number is loaded one tile ahead of the page: within one step it would count as a stage.
        def step(i, carry):
            places, carry = carry
            return _places(place_of, i + 1, schedule.block_keys), attend(*tile(i, places), carry)

        carry = _nothing(schedule.block_keys, lanes.shape[0], head_dim)
        _, (m, l, o) = lax.fori_loop(first, last, step, (first_places, carry))  # noqa: E741
        lse, o = _normalised(m * scale, l.sum(axis=0), o.T)
        store(part, lse, o)

    def add_new_token():
        # The key is repeated for each query head, so that they meet without an exchange between threads.
        k = _load_heads(qkv, row, lanes * 0 + heads + kv_head, k_norm, rope)
        v = qkv[row, (lanes * 0 + heads + kv_heads + kv_head)[:, None], lax.div(dims, half), lax.rem(dims, half)]
        place = place_of(lax.div(position, PAGE_SIZE))
        here = active & (place >= 0) & (place < num_pages)
        new_q, new_k = (_norm_and_rotate(x, eps, round_to) for x in (q, k))
        score = (new_q.astype(jnp.float32) * new_k.astype(jnp.float32)).sum(axis=1)
        store(part, jnp.where(here, score * scale, -jnp.inf), jnp.where(here, v.astype(jnp.float32), 0.0))

        @pl.when(here)
        def _():
            at = (place, kv_head, lax.rem(position, PAGE_SIZE) + (lanes * 0)[:, None], dims)
            k_out[at], v_out[at] = new_k, v  # equal rows to one place

    def merge(counter, first, count, most, then):
        """Called by each of the `count` programs, at most `most`, that stored the parts from slot `first` on: the last
        one goes on with them merged."""
        if not interpret:
            plt.debug_barrier()  # every thread has stored before one of them counts
        arrived = plt.atomic_add(counters, (row, kv_head, jnp.int32(counter)), jnp.int32(1))

        @pl.when(arrived == count - 1)
        def _():
            counters[row, kv_head, counter] = 0
            then(*_merged(o_out, lse_out, row, first, count, most, own))

    def merge_parts():
        count, most = splits + 1, schedule.num_splits + 1
        groups, size = merge_groups(most)
        if groups == 1:
            return merge(0, 0, count, most, finish)
        group = lax.div(part, size)

        def merge_with_other_groups(lse, o):
            store(most + group, lse, o)
            merge(0, most, lax.div(count + size - 1, size), groups, finish)

        return merge(1 + group, group * size, jnp.minimum(count - group * size, size), size, merge_with_other_groups)

    def finish(lse, o):
        weight = 1.0 / (1.0 + jnp.exp2(sinks[own] * LOG2_E - lse))  # 0 without keys
        out[row, own[:, None], dims] = round_to(o * weight[:, None])

    if not interpret:
        plt.debug_barrier()  # or the compiler requests the queries after it has waited for the position

    @pl.when(part <= splits)
    def _():
        lax.cond(part > 0, attend_to_tiles, add_new_token)
        merge_parts()


def _page_table(table, row):
    """The function from a page to its place in a pool. A short row is loaded whole, not waiting for a position."""
    entries = table.shape[1]
    if entries > WARP:
        return lambda page: table[row, lax.rem(page, entries)]
    lanes = lax.iota(jnp.int32, WARP)
    places = plt.load(table.at[row, lanes], mask=lanes < entries, other=0)
    least = jnp.iinfo(jnp.int32).min
    return lambda page: jnp.where(lanes == lax.rem(page, entries), places, least).max()


def _tiles(position, active, window, keys):
    """The first key that the token sees (None: all), and the tiles that hold keys before `position`: first, count."""
    first_key, start = None, 0
    if window is not None:
        first_key = jnp.maximum(position - (window - 1), 0)
        start = lax.div(first_key, keys)
    return first_key, start, jnp.where(active, lax.div(position + keys - 1, keys) - start, 0)


def _places(place_of, tile, block_keys):
    page = lax.div(tile * block_keys, PAGE_SIZE)
    return [place_of(page + i) for i in range(pl.cdiv(block_keys, PAGE_SIZE))]


def _load_heads(qkv, row, heads, norm, rope):
    """Rows of qkv with their norm's weights, and where RoPE needs it both with the halves exchanged (registers cannot
    be), cos and signed sin. All [heads, 2, head_dim / 2] float32: of one shape, they meet without an exchange."""
    dims = lax.iota(jnp.int32, qkv.shape[-1])[None, None, :]
    side = lax.broadcasted_iota(jnp.int32, (heads.shape[0], 2, 1), 1)

    def load(side):
        x, weight = qkv[row, heads[:, None, None], side, dims], norm[side, dims]
        return x.astype(jnp.float32), weight.astype(jnp.float32)

    if rope is None:
        return load(side), None
    cos, sin = (angle[row, side * 0, dims] for angle in rope)
    return load(side), (*load(1 - side), cos, jnp.where(side == 0, -sin, sin))


def _norm_and_rotate(loaded, eps, round_to):
    """RMSNorm and RoPE of what `_load_heads` gave, each rounded once: [heads, head_dim]."""
    (x, weight), exchanged = loaded
    heads, _, half = x.shape
    r = lax.rsqrt((x * x).sum(axis=2).sum(axis=1) / (2 * half) + eps)[:, None, None]
    n = round_to(x * r * weight)
    if exchanged is not None:
        x, weight, cos, sin = exchanged
        n = round_to(n.astype(jnp.float32) * cos + round_to(x * r * weight).astype(jnp.float32) * sin)
    return n.reshape(heads, 2 * half)


def _load_tile(k_pool, v_pool, kv_head, first_key, position, block_keys, tile, places):
    """K and V [block_keys, head_dim] of a tile's visible keys, zero elsewhere, and which rows these are."""
    lanes = lax.iota(jnp.int32, block_keys)
    place = places[0]
    for i, following in enumerate(places[1:], 1):
        place = jnp.where(lanes < i * PAGE_SIZE, place, following)
    keys = tile * block_keys + lanes
    keep = keys < jnp.where((place >= 0) & (place < k_pool.shape[0]), position, 0)
    if first_key is not None:
        keep &= keys >= first_key
    slots = lax.rem(tile * block_keys, PAGE_SIZE) + lanes if block_keys < PAGE_SIZE else lax.rem(lanes, PAGE_SIZE)
    at = (
        jnp.broadcast_to(place, block_keys)[:, None],
        kv_head,
        slots[:, None],
        lax.iota(jnp.int32, k_pool.shape[3])[None],
    )
    k, v = (plt.load(pool.at[at], mask=keep[:, None], other=0.0) for pool in (k_pool, v_pool))
    return k, v, keep


def _nothing(block_keys, heads, head_dim):
    """The running m [heads], l [block_keys, heads], o [head_dim, heads] of no keys."""
    m = jnp.full(heads, -jnp.inf, jnp.float32)
    return m, jnp.zeros((block_keys, heads), jnp.float32), jnp.zeros((head_dim, heads), jnp.float32)


def _attend(q, scale, round_to, k, v, keep, carry):
    """Adds a tile's keys to the running (m, l, o)."""
    m, l, o = carry  # noqa: E741
    s = jnp.where(keep[:, None], _dot(k, q, 1, 1), -jnp.inf)
    new_m = jnp.maximum(m, s.max(axis=0))
    shift = _finite(new_m)
    p = jnp.exp2((s - shift[None]) * scale)
    alpha = jnp.exp2((m - shift) * scale)[None]
    return new_m, l * alpha + p, o * alpha + _dot(v, round_to(p), 0, 0)


def _merged(o_parts, lse_parts, row, first, count, most, heads):
    """lse [heads] and o [heads, head_dim] over slots first to first + count - 1, all of whose loads are in flight at
    once; `most` bounds the count."""
    dims = lax.iota(jnp.int32, o_parts.shape[-1])[None]
    lses, values = [], []
    for i in range(most):
        real, slot = jnp.broadcast_to(i < count, heads.shape), first + i
        at = (row, slot, heads[:, None], dims)
        lses.append(plt.load(lse_parts.at[row, slot, heads], mask=real, other=-jnp.inf))
        values.append(plt.load(o_parts.at[at], mask=real[:, None], other=0.0))
    top = functools.reduce(jnp.maximum, lses)
    weights = [jnp.exp2(lse - _finite(top)) for lse in lses]
    return _normalised(top, sum(weights), sum(w[:, None] * o for w, o in zip(weights, values, strict=True)))


def _normalised(m, l, o):  # noqa: E741
    """lse and o of a Partial from the largest base-2 logit m [heads], the sum of weights l [heads], both relative to m,
    and the weighted sum o [heads, head_dim]."""
    some = l > 0.0  # or no page of the keys exists
    return jnp.where(some, m + jnp.log(l) * LOG2_E, -jnp.inf), o * jnp.where(some, 1.0 / l, 0.0)[:, None]


def _finite(m):
    """A maximum to subtract: 0 in place of the -inf of no keys."""
    return jnp.where(m == -jnp.inf, 0.0, m)


def _rounded(x, dtype, interpret):
    """Rounds float32 once. Interpreted, the kernel is XLA's to simplify, which may drop a plain cast."""
    if interpret and dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def _dot(a, b, a_axis, b_axis):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
