"""Decode attention in plain jnp: the definition. Reads the whole table of every row."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax


def decode_attention(
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
    *,
    window: int | None,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As the public function, whose docstring says what the arguments are."""
    batch = qkv.shape[0]
    _, kv_heads, _, head_dim = k_pool.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q, k, v = jnp.split(qkv.reshape(batch, -1, head_dim), (heads, heads + kv_heads), axis=1)
    q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    if rope is not None:
        q, k = rotate(q, *rope), rotate(k, *rope)
    valid = valid.astype(bool)
    k_pool, v_pool = (write(pool, new, table, positions, valid) for pool, new in ((k_pool, k), (v_pool, v)))
    (k, seen), (v, _) = (gather(pool, table, positions, valid, window) for pool in (k_pool, v_pool))
    out = attend(q.reshape(batch, kv_heads, -1, head_dim), k, v, seen, sinks.reshape(kv_heads, -1))
    return out.reshape(batch, heads * head_dim), k_pool, v_pool


def attend(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, sinks: jax.Array) -> jax.Array:
    """q [batch, kv_heads, group, head_dim], k and v [batch, kv_heads, keys, head_dim], seen [batch, keys], sinks
    [kv_heads, group] -> like q. Rows that see nothing give 0."""
    c = q.shape[-1] ** -0.5 * math.log2(math.e)
    seen_by_head = seen[:, None, None, :]
    scores = jnp.where(seen_by_head, dot32("bkgd,bksd->bkgs", q, k), -jnp.inf)
    m = scores.max(axis=-1, keepdims=True)
    m = jnp.where(m == -jnp.inf, 0.0, m)
    p = jnp.exp2(c * scores - c * m)
    z = p.sum(axis=-1, keepdims=True) + jnp.exp2(sinks.astype(jnp.float32)[..., None] * math.log2(math.e) - c * m)
    o = dot32("bkgs,bksd->bkgd", rounded(p, q.dtype), v)
    return rounded(jnp.where(seen_by_head.any(axis=-1, keepdims=True), o * (1.0 / z), 0.0), q.dtype)


def write(pool: jax.Array, new: jax.Array, table: jax.Array, positions: jax.Array, valid: jax.Array) -> jax.Array:
    """Puts new [batch, kv_heads, head_dim] in its pages."""
    num_pages, _, page_size, _ = pool.shape
    entry = positions // page_size % table.shape[1]
    place = jnp.take_along_axis(table, entry[:, None], axis=1)[:, 0]
    place = jnp.where(valid & (place >= 0), place, num_pages)
    return pool.at[place, :, positions % page_size].set(new, mode="drop")


def gather(
    pool: jax.Array, table: jax.Array, positions: jax.Array, valid: jax.Array, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """All that a row's table holds [batch, kv_heads, keys, head_dim], zeros where not seen, and what is seen."""
    num_pages, kv_heads, page_size, head_dim = pool.shape
    batch, entries = table.shape
    # The page an entry holds is the last one, up to the token's own, that falls on it.
    last = positions[:, None] // page_size
    pages = last - (last - jnp.arange(entries)) % entries
    keys = (pages[:, :, None] * page_size + jnp.arange(page_size)).reshape(batch, -1)
    exists = (table >= 0) & (table < num_pages)
    seen = (keys >= 0) & (keys <= positions[:, None]) & jnp.repeat(exists, page_size, axis=1) & valid[:, None]
    if window is not None:
        seen &= keys > positions[:, None] - window
    rows = pool[jnp.where(exists, table, 0)].swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim)
    return jnp.where(seen[:, None, :, None], rows, 0), seen


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., head_dim], weight [head_dim]."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return rounded(wide * scale * weight.astype(jnp.float32), x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [batch, heads, head_dim], cos and sin [batch, head_dim / 2]: dimension d pairs with d + head_dim / 2."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return rounded(jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1), x.dtype)


def dot32(subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """einsum accumulated in float32."""
    precision = lax.Precision.HIGHEST
    return jnp.einsum(subscripts, x, w, preferred_element_type=jnp.float32, precision=precision)


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds float32 once; a compiler may drop a plain cast."""
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)
