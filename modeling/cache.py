"""Paged KV cache: plain pytrees of pages, and the tables that say which page holds which tokens.

A page holds PAGE_SIZE consecutive tokens of one sequence in one layer. Full-attention layers share one numbering of
pages and sliding layers another, since a sliding layer needs only the pages its window reaches:

    logical page p of a sequence holds positions p * PAGE_SIZE .. p * PAGE_SIZE + PAGE_SIZE - 1
    full layers:     pages.full[row, p]              is its place in the full pools
    sliding layers:  pages.window[row, p % ring]     is its place in the window pools

`ring` is large enough that the pages of a window and of the chunk being written never meet. A place equal to the pool
size means "no page": writes to it are dropped, reads of it are masked.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from modeling.flint.config import SLIDING, FlintConfig

PAGE_SIZE = 64  # tokens


class LayerCache(NamedTuple):
    """One layer's pool: keys (after norm and RoPE) and values, each [num_pages, num_kv_heads, PAGE_SIZE, head_dim]."""

    k: jax.Array
    v: jax.Array


Cache = tuple[LayerCache, ...]


class PageTables(NamedTuple):
    """Where each row's pages are: `full` [batch, max_pages] and `window` [batch, ring], int32."""

    full: jax.Array
    window: jax.Array


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Sizes of the pools.

    Attributes:
        num_full_pages, num_window_pages: pages a full-attention and a sliding layer's pool holds.
        max_pages: logical pages a sequence may have (its longest length / PAGE_SIZE).
        ring: window pages a sequence has; see `window_ring`.
    """

    num_full_pages: int
    num_window_pages: int
    max_pages: int
    ring: int

    @classmethod
    def for_sequences(cls, config: FlintConfig, num_sequences: int, max_len: int, max_chunk: int) -> CacheShape:
        """Pools that hold `num_sequences` sequences of `max_len` tokens, written `max_chunk` tokens at a time."""
        max_pages, ring = pages_for(max_len), window_ring(config, max_len, max_chunk)
        return cls(num_sequences * max_pages, num_sequences * ring, max_pages, ring)

    def bytes(self, config: FlintConfig, dtype: jnp.dtype) -> int:
        """Device memory of the whole cache."""
        per_page = 2 * config.num_key_value_heads * PAGE_SIZE * config.head_dim * jnp.dtype(dtype).itemsize
        sliding = sum(kind == SLIDING for kind in config.layer_types)
        full = config.num_hidden_layers - sliding
        return per_page * (full * self.num_full_pages + sliding * self.num_window_pages)


def pages_for(num_tokens: int) -> int:
    """Pages that `num_tokens` tokens from position 0 occupy."""
    return -(-num_tokens // PAGE_SIZE)


def window_ring(config: FlintConfig, max_len: int, max_chunk: int) -> int:
    """Pages a sequence needs in a sliding layer, whatever its length.

    The window behind the chunk and the chunk itself are `window - 1 + max_chunk` consecutive positions, which touch at
    most one page more than they fill.
    """
    if config.sliding_window is None:
        return pages_for(max_len)
    return min(pages_for(config.sliding_window - 1 + max_chunk) + 1, pages_for(max_len))


def make_cache(config: FlintConfig, shape: CacheShape, dtype: jnp.dtype) -> Cache:
    """An empty cache on the default device; donate it to every step."""

    def layer(kind: str) -> LayerCache:
        num_pages = shape.num_window_pages if kind == SLIDING else shape.num_full_pages
        pool = (num_pages, config.num_key_value_heads, PAGE_SIZE, config.head_dim)
        return LayerCache(jnp.zeros(pool, dtype), jnp.zeros(pool, dtype))

    return tuple(layer(kind) for kind in config.layer_types)


def write_pages(
    cache: LayerCache, k: jax.Array, v: jax.Array, table: jax.Array, positions: jax.Array, valid: jax.Array
) -> LayerCache:
    """Stores new keys and values in their pages, in place when the cache is donated.

    Args:
        k, v: [batch, tokens, num_kv_heads, head_dim].
        table: [batch, entries] int32; logical page p is entry `p % entries`.
        positions: [batch, tokens] int32.
        valid: [batch, tokens] bool; the rest is not written.
    """
    num_pages, _, _, _ = cache.k.shape
    entry = (positions // PAGE_SIZE) % table.shape[1]
    page = jnp.where(valid, jnp.take_along_axis(table, entry, axis=1), num_pages)
    page = jnp.where((page >= 0) & (page < num_pages), page, num_pages)  # a negative index would wrap around
    at = (page, slice(None), positions % PAGE_SIZE)
    return LayerCache(
        cache.k.at[at].set(k.astype(cache.k.dtype), mode="drop"),
        cache.v.at[at].set(v.astype(cache.v.dtype), mode="drop"),
    )
