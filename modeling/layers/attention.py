"""Grouped-query attention: dense over one chunk, and over a paged cache, with what either model adds to it.

* Sinks (Flint): one more softmax logit a query head, without a value: it takes probability and gives nothing. It is
  not multiplied by the attention scale.
* A relative bias (Inkling): `rel[t, h, distance]` is added to the scaled score of the key that many positions back.
  Keys beyond its extent are seen with bias zero. It is not multiplied by the attention scale either.

Rounding follows the reference's decode kernel: float32 scores, probabilities rounded for the product with the values,
their sum taken before that rounding.
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


def relative_bias(rel: jax.Array, q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
    """The bias of each query and key: rel [batch, tokens, heads, extent] -> [batch, heads, tokens, keys] float32.

    Args:
        q_positions: [batch, tokens]. k_positions: [batch, keys].
    """
    extent = rel.shape[-1]
    distance = q_positions[:, :, None] - k_positions[:, None, :]
    picked = jnp.take_along_axis(rel, jnp.clip(distance, 0, extent - 1)[:, :, None, :], axis=-1)
    inside = (distance >= 0) & (distance < extent)
    return jnp.where(inside[:, :, None, :], picked, 0).astype(jnp.float32).swapaxes(1, 2)


def partial_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float, bias: jax.Array | None = None
) -> Partial:
    """q [batch, tokens, heads, head_dim], k and v [batch, kv_heads, keys, head_dim], mask [batch, tokens, keys], bias
    [batch, heads, tokens, keys].

    Masked keys and values may hold anything, NaN included: they are replaced, not weighted by zero.
    """
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    scores = dot32("btkgd,bksd->bkgts", grouped, k)
    if bias is not None:
        # Scores stay unscaled up to the exponential; a division by a scale that is a power of two is exact.
        scores = scores + bias.reshape(batch, kv_heads, heads // kv_heads, tokens, -1) / scale
    mask = mask[:, None, None]
    scores = jnp.where(mask, scores, -jnp.inf)
    m = scores.max(-1)
    p = jnp.where(mask, jnp.exp2(scale * LOG2_E * (scores - _finite(m)[..., None])), 0.0)
    used = mask.any(axis=3)[:, 0, 0, None, :, None]  # keys that some query of the row sees
    o = dot32("bkgts,bksd->bkgtd", rounded(p, q.dtype), jnp.where(used, v, 0))
    return Partial(m, p.sum(-1), o)


def merge(a: Partial, b: Partial, scale: float) -> Partial:
    """Partials of two disjoint sets of keys as the partial of their union."""
    m = jnp.maximum(a.m, b.m)
    scale_a, scale_b = (jnp.exp2(scale * LOG2_E * (part.m - _finite(m))) for part in (a, b))
    return Partial(m, a.l * scale_a + b.l * scale_b, a.o * scale_a[..., None] + b.o * scale_b[..., None])


def finish(part: Partial, sinks: jax.Array | None, scale: float, dtype: jnp.dtype) -> jax.Array:
    """Adds the sinks [heads] once and normalises: [batch, tokens, heads, head_dim]. Queries without keys give 0."""
    batch, kv_heads, group, tokens, head_dim = part.o.shape
    z = part.l
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, group, 1)
        z = z + jnp.exp2(sink * LOG2_E - scale * LOG2_E * _finite(part.m))
    out = jnp.where((part.l > 0)[..., None], part.o / z[..., None], 0.0)
    return rounded(out.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, kv_heads * group, head_dim), dtype)


def _finite(m: jax.Array) -> jax.Array:
    return jnp.where(m == -jnp.inf, 0.0, m)


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    positions: jax.Array,
    window: int | None,
    *,
    rel: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Causal attention of a chunk to itself, without a cache; differentiable. The definition.

    Args:
        q: [batch, tokens, num_heads, head_dim]. k, v: [batch, tokens, num_kv_heads, head_dim].
        sinks: [num_heads]. positions: [batch, tokens].
        rel: [batch, tokens, num_heads, extent], the bias by distance.
        scale: of the scores; None means 1 / sqrt(head_dim).

    Returns:
        [batch, tokens, num_heads, head_dim] in q's dtype.
    """
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    mask = visible(positions, positions, window)
    bias = None if rel is None else relative_bias(rel, positions, positions)
    part = partial_attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask, scale, bias)
    return finish(part, sinks, scale, q.dtype)


def paged_attention(
    q: jax.Array,
    cache: LayerCache,
    sinks: jax.Array | None,
    table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    window: int | None,
    *,
    rel: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Causal attention of a chunk, already written to its pages, to everything before it.

    Walks over blocks of pages with a running maximum, from the first page that any window reaches to the last one
    written, so that the cost follows the lengths at hand and memory does not grow with them.

    Args:
        q: [batch, tokens, num_heads, head_dim].
        table: [batch, entries] int32 page numbers; logical page p is entry `p % entries`.
        positions: [batch, tokens], consecutive in a row. valid: [batch, tokens]; other queries give 0.
        rel, scale: as for `dense_attention`.

    Returns:
        [batch, tokens, num_heads, head_dim] in q's dtype.
    """
    batch, tokens, heads, head_dim = q.shape
    num_pages, kv_heads = cache.k.shape[:2]
    entries = table.shape[1]
    scale = float(head_dim**-0.5) if scale is None else scale
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
        k, v = (
            pool[places].swapaxes(1, 2).reshape(batch, kv_heads, block * PAGE_SIZE, head_dim)
            for pool in (cache.k, cache.v)
        )
        k_positions = pages[:, :, None] * PAGE_SIZE + jnp.arange(PAGE_SIZE)
        k_positions = jnp.where(known[:, :, None], k_positions, -1).reshape(batch, -1)
        mask = visible(positions, k_positions, window) & valid[:, :, None]
        bias = None if rel is None else relative_bias(rel, positions, k_positions)
        return merge(part, partial_attention(q, k, v, mask, scale, bias), scale)

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
    return finish(part, sinks, scale, q.dtype)


def _pages_a_block(score_rows: int, entries: int) -> int:
    """Pages to gather at once: about 1/32 of the longest context, at least 16, within MAX_BLOCK_SCORES."""
    fitting = max(1, MAX_BLOCK_SCORES // (score_rows * PAGE_SIZE))
    return min(max(16, entries // 32), fitting)
