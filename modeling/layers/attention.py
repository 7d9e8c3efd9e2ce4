"""Grouped-query attention with sinks: dense over one chunk, and over a paged cache.

A sink is one more softmax logit a query head, without a value: it takes probability and gives nothing. It is not
multiplied by the attention scale. Rounding follows the reference's decode kernel: float32 scores, probabilities
rounded for the product with the values, their sum taken before that rounding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from modeling.cache import PAGE_SIZE, LayerCache
from modeling.layers.numerics import dot32, rounded

LOG2_E = math.log2(math.e)
# Elements of one block of scores: bounds the memory of a prefill chunk over a long context (float32, 256 MB).
MAX_BLOCK_SCORES = 1 << 26


class Partial(NamedTuple):
    """Attention over some of the keys, unnormalised, in float32.

    `m` and `l` are [batch, kv_heads, group, tokens]: the largest score (-inf where no key is visible) and the sum of
    exp2 of the others relative to it; `o` [batch, kv_heads, group, tokens, head_dim] is the weighted sum of values.
    """

    m: jax.Array
    l: jax.Array  # noqa: E741  (the name used in the papers)
    o: jax.Array


def visible(q_positions: jax.Array, k_positions: jax.Array, window: int | None) -> jax.Array:
    """Which keys a query sees: q [batch, tokens], k [batch, keys] -> bool [batch, tokens, keys].

    `window` counts the query's own position: 513 means 512 back. Negative key positions stand for no key.
    """
    distance = q_positions[:, :, None] - k_positions[:, None, :]
    seen = (distance >= 0) & (k_positions[:, None, :] >= 0)
    return seen if window is None else seen & (distance < window)


def partial_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Partial:
    """q [batch, tokens, heads, head_dim], k and v [batch, kv_heads, keys, head_dim], mask [batch, tokens, keys].

    Masked keys and values may hold anything, NaN included: they are replaced, not weighted by zero.
    """
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    scores = dot32("btkgd,bksd->bkgts", grouped, k)
    mask = mask[:, None, None]
    scores = jnp.where(mask, scores, -jnp.inf)
    m = scores.max(-1)
    p = jnp.where(mask, jnp.exp2(_exp2_scale(head_dim) * (scores - _finite(m)[..., None])), 0.0)
    used = mask.any(axis=3)[:, 0, 0, None, :, None]  # keys that some query of the row sees
    o = dot32("bkgts,bksd->bkgtd", rounded(p, q.dtype), jnp.where(used, v, 0))
    return Partial(m, p.sum(-1), o)


def merge(a: Partial, b: Partial, head_dim: int) -> Partial:
    """Partials of two disjoint sets of keys as the partial of their union."""
    m = jnp.maximum(a.m, b.m)
    scale_a, scale_b = (jnp.exp2(_exp2_scale(head_dim) * (part.m - _finite(m))) for part in (a, b))
    return Partial(m, a.l * scale_a + b.l * scale_b, a.o * scale_a[..., None] + b.o * scale_b[..., None])


def finish(part: Partial, sinks: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Adds the sinks [heads] once and normalises: [batch, tokens, heads, head_dim]. Queries without keys give 0."""
    batch, kv_heads, group, tokens, head_dim = part.o.shape
    sink = sinks.astype(jnp.float32).reshape(1, kv_heads, group, 1)
    z = part.l + jnp.exp2(sink * LOG2_E - _exp2_scale(head_dim) * _finite(part.m))
    out = jnp.where((part.l > 0)[..., None], part.o / z[..., None], 0.0)
    return rounded(out.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, kv_heads * group, head_dim), dtype)


def _exp2_scale(head_dim: int) -> float:
    return head_dim**-0.5 * LOG2_E


def _finite(m: jax.Array) -> jax.Array:
    return jnp.where(m == -jnp.inf, 0.0, m)


def dense_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array, positions: jax.Array, window: int | None
) -> jax.Array:
    """Causal attention of a chunk to itself, without a cache; differentiable. The definition.

    Args:
        q: [batch, tokens, num_heads, head_dim]. k, v: [batch, tokens, num_kv_heads, head_dim].
        sinks: [num_heads]. positions: [batch, tokens].

    Returns:
        [batch, tokens, num_heads, head_dim] in q's dtype.
    """
    mask = visible(positions, positions, window)
    return finish(partial_attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask), sinks, q.dtype)


def paged_attention(
    q: jax.Array,
    cache: LayerCache,
    sinks: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    window: int | None,
) -> jax.Array:
    """Causal attention of a chunk, already written to its pages, to everything before it.

    Walks over blocks of pages with a running maximum, from the first page that any window reaches to the last one
    written, so that the cost follows the lengths at hand and memory does not grow with them.

    Args:
        q: [batch, tokens, num_heads, head_dim].
        table: [batch, entries] int32 page numbers; logical page p is entry `p % entries`.
        positions: [batch, tokens], consecutive in a row. valid: [batch, tokens]; other queries give 0.

    Returns:
        [batch, tokens, num_heads, head_dim] in q's dtype.
    """
    batch, tokens, heads, head_dim = q.shape
    num_pages, kv_heads = cache.k.shape[:2]
    entries = table.shape[1]
    first = jnp.zeros(batch, jnp.int32)
    if window is not None:
        first = jnp.maximum(positions[:, 0] - (window - 1), 0) // PAGE_SIZE
    last = jnp.where(valid, positions, -1).max(axis=1) // PAGE_SIZE  # -1 in an idle row
    # In a sliding layer, the pages that a window and the chunk can touch are known when compiling: often one block.
    span = entries if window is None else min(-(-(window - 1 + tokens) // PAGE_SIZE) + 1, entries)
    block = min(_pages_a_block(batch * heads * tokens, entries), span)

    def attend_block(i: jax.Array, part: Partial) -> Partial:
        pages = first[:, None] + i * block + jnp.arange(block)  # logical, [batch, block]
        places = jnp.take_along_axis(table, pages % entries, axis=1)
        known = (pages <= last[:, None]) & (places >= 0) & (places < num_pages)
        places = jnp.where(known, places, 0)
        k, v = (pool[places].swapaxes(1, 2).reshape(batch, kv_heads, block * PAGE_SIZE, head_dim) for pool in cache)
        k_positions = pages[:, :, None] * PAGE_SIZE + jnp.arange(PAGE_SIZE)
        k_positions = jnp.where(known[:, :, None], k_positions, -1).reshape(batch, -1)
        mask = visible(positions, k_positions, window) & valid[:, :, None]
        return merge(part, partial_attention(q, k, v, mask), head_dim)

    shape = (batch, kv_heads, heads // kv_heads, tokens)
    part = Partial(jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    if window is not None:
        num_blocks = -(-span // block)
    else:
        num_blocks = (last - first).max() // block + 1
    if window is not None and num_blocks == 1:
        part = attend_block(jnp.int32(0), part)
    else:
        part = lax.fori_loop(0, num_blocks, attend_block, part)
    return finish(part, sinks, q.dtype)


def _pages_a_block(score_rows: int, entries: int) -> int:
    """Pages to gather at once: about 1/32 of the longest context, at least 16, within MAX_BLOCK_SCORES."""
    fitting = max(1, MAX_BLOCK_SCORES // (score_rows * PAGE_SIZE))
    return min(max(16, entries // 32), fitting)
