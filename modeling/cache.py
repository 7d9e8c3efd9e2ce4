"""What a model keeps of the tokens it has seen: plain pytrees, and the tables that say whose they are.

Keys and values are paged. A page holds PAGE_SIZE consecutive tokens of one sequence in one layer. Full-attention layers
share one numbering of pages and sliding layers another, since a sliding layer needs only the pages its window reaches:

    logical page p of a sequence holds positions p * PAGE_SIZE .. p * PAGE_SIZE + PAGE_SIZE - 1
    full layers:     pages.full[row, p]              is its place in the full pools
    sliding layers:  pages.window[row, p % ring]     is its place in the window pools

`ring` is large enough that the pages of a window and of the chunk being written never meet. A place equal to the pool
size means "no page": writes to it are dropped, reads of it are masked.

Short convolutions need only the last few inputs. Each slot (a sequence's place in the engine) has a ring of them:

    position p of a sequence                         is rings[pages.slot[row], p % ring length]

Everything is found by position, and what precedes position 0 is zero by definition. So nothing needs clearing when a
slot changes hands, and rolling back to an earlier length, as speculative decoding does, needs no work at all: rows
past the length are never read and get overwritten. The rings hold as many positions more than the taps need as a
sequence may be rolled back.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from modeling.layer_shape import LayerShape

PAGE_SIZE = 64  # tokens


class CachedConfig(Protocol):
    """What the cache must know of a model's config. Sliding layers share one `sliding_window`."""

    @property
    def cache_layers(self) -> tuple[LayerShape, ...]: ...
    @property
    def draft_cache_layers(self) -> tuple[LayerShape, ...]: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def conv_kernel_size(self) -> int: ...


class ConvRings(NamedTuple):
    """Raw inputs of a layer's four short convolutions, [num_slots, ring, channels] each."""

    k: jax.Array
    v: jax.Array
    attn: jax.Array
    mlp: jax.Array


class LayerCache(NamedTuple):
    """One layer's pools: keys (as attention multiplies them) and values, each [num_pages, num_kv_heads, PAGE_SIZE,
    head_dim]; and the rings of its short convolutions, where it has them."""

    k: jax.Array
    v: jax.Array
    conv: ConvRings | None = None


class DraftRings(NamedTuple):
    """What drafting starts from: the trunk's final hidden states and input embeddings of the last positions,
    [num_slots, ring, hidden_size] each."""

    hidden: jax.Array
    embeds: jax.Array


class Cache(NamedTuple):
    """The trunk's layers; for speculation also those of the drafting depths, and what these start from."""

    layers: tuple[LayerCache, ...]
    drafts: tuple[LayerCache, ...] = ()
    rings: DraftRings | None = None


class PageTables(NamedTuple):
    """Where each row's state is: pages `full` [batch, max_pages] and `window` [batch, ring], and `slot` [batch], the
    row's place in the rings; int32."""

    full: jax.Array
    window: jax.Array
    slot: jax.Array


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Sizes of the pools.

    Attributes:
        num_full_pages, num_window_pages: pages a full-attention and a sliding layer's pool holds.
        max_pages: logical pages a sequence may have (its longest length / PAGE_SIZE).
        ring: window pages a sequence has; see `window_ring`.
        num_slots: sequences that may be in the cache.
        num_drafts: tokens drafted a step, each by a depth of its own; 0 without speculation.
    """

    num_full_pages: int
    num_window_pages: int
    max_pages: int
    ring: int
    num_slots: int
    num_drafts: int = 0

    @classmethod
    def for_sequences(
        cls, config: CachedConfig, num_sequences: int, max_len: int, max_chunk: int, num_drafts: int = 0
    ) -> CacheShape:
        """Pools that hold `num_sequences` sequences of `max_len` tokens, written `max_chunk` tokens at a time."""
        # A step checks the drafts in one chunk; the depths then go over as many rows again.
        max_chunk = max(max_chunk, 2 * (num_drafts + 1))
        max_pages, ring = pages_for(max_len), window_ring(config, max_len, max_chunk)
        return cls(num_sequences * max_pages, num_sequences * ring, max_pages, ring, num_sequences, num_drafts)

    def bytes(self, config: CachedConfig, dtype: jnp.dtype) -> int:
        """Device memory of the whole cache."""
        leaves = jax.tree.leaves(jax.eval_shape(lambda: make_cache(config, self, dtype)))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def pages_for(num_tokens: int) -> int:
    """Pages that `num_tokens` tokens from position 0 occupy."""
    return -(-num_tokens // PAGE_SIZE)


def window_ring(config: CachedConfig, max_len: int, max_chunk: int) -> int:
    """Pages a sequence needs in a sliding layer, whatever its length.

    The window behind the chunk and the chunk itself are `window - 1 + max_chunk` consecutive positions, which touch at
    most one page more than they fill.
    """
    if config.sliding_window is None:
        return pages_for(max_len)
    return min(pages_for(config.sliding_window - 1 + max_chunk) + 1, pages_for(max_len))


def make_cache(config: CachedConfig, shape: CacheShape, dtype: jnp.dtype) -> Cache:
    """An empty cache on the default device; donate it to every step."""
    num_drafts = shape.num_drafts
    # The taps' own reach, the row at hand, and as many rows as may be rolled back.
    ring = config.conv_kernel_size + num_drafts

    def layer(of: LayerShape) -> LayerCache:
        num_pages = shape.num_window_pages if of.sliding else shape.num_full_pages
        pool = (num_pages, of.num_kv_heads, PAGE_SIZE, of.head_dim)
        rings = [jnp.zeros((shape.num_slots, ring, channels), dtype) for channels in of.conv_channels]
        return LayerCache(jnp.zeros(pool, dtype), jnp.zeros(pool, dtype), ConvRings(*rings) if rings else None)

    layers = tuple(map(layer, config.cache_layers))
    if not num_drafts:
        return Cache(layers)
    # The depths go over the last num_drafts + 1 rows, after a step that wrote as many and kept perhaps one.
    last = (shape.num_slots, 2 * num_drafts + 1, config.hidden_size)
    rings = DraftRings(jnp.zeros(last, dtype), jnp.zeros(last, dtype))
    return Cache(layers, tuple(map(layer, config.draft_cache_layers[:num_drafts])), rings)


def consecutive_pages(shape: CacheShape) -> PageTables:
    """Tables of `num_slots` sequences that are all there is: each has its share of the pools, in order."""
    return PageTables(
        jnp.arange(shape.num_full_pages, dtype=jnp.int32).reshape(shape.num_slots, -1),
        jnp.arange(shape.num_window_pages, dtype=jnp.int32).reshape(shape.num_slots, -1),
        jnp.arange(shape.num_slots, dtype=jnp.int32),
    )


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
    return cache._replace(
        k=cache.k.at[at].set(k.astype(cache.k.dtype), mode="drop"),
        v=cache.v.at[at].set(v.astype(cache.v.dtype), mode="drop"),
    )


def read_ring(ring: jax.Array, slots: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows at `positions` [batch, n] of the rings of `slots` [batch]: [batch, n, channels].

    What precedes the sequence, a negative position, is zero.
    """
    rows = ring[slots[:, None], positions % ring.shape[1]]
    return jnp.where((positions >= 0)[..., None], rows, 0)


def write_ring(ring: jax.Array, slots: jax.Array, rows: jax.Array, starts: jax.Array, lengths: jax.Array) -> jax.Array:
    """Stores the rows of a chunk that fit, the last ones, at their positions.

    Args:
        ring: [num_slots, length, channels]. slots: [batch], all different.
        rows: [batch, chunk, channels], of which `lengths` [batch] are real, from position `starts` [batch] on.
    """
    length, chunk = ring.shape[1], rows.shape[1]
    last = (starts + lengths)[:, None] - 1
    # The last position of each place up to now; places whose position precedes the chunk keep what they hold.
    offset = last - (last - jnp.arange(length)) % length - starts[:, None]  # [batch, length]
    new = jnp.take_along_axis(rows, jnp.clip(offset, 0, chunk - 1)[..., None], axis=1)
    kept = jnp.where((offset >= 0)[..., None], new.astype(ring.dtype), ring[slots])
    return ring.at[slots].set(kept, mode="drop")


def snapshot_conv(cache: Cache, slot: jax.Array, length: jax.Array, taps: int) -> list[jax.Array]:
    """The short convolutions' state of one slot [] after `length` [] tokens: `taps` rows a ring, [taps, channels].

    Together with the pages before `length`, this is all that a sequence sharing the prefix needs, but for drafts: the
    depths' last rows before `length` have read tokens after it, which the other sequence does not share.
    """
    positions = (length - taps + jnp.arange(taps))[None]
    return [read_ring(ring, slot[None], positions)[0] for ring in _conv_rings(cache)]


def restore_conv(cache: Cache, slot: jax.Array, length: jax.Array, snapshot: list[jax.Array]) -> Cache:
    """The cache with a `snapshot_conv` put into another slot, which continues at `length`."""
    rings = [
        write_ring(ring, slot[None], rows[None], length[None] - rows.shape[0], jnp.full(1, rows.shape[0]))
        for ring, rows in zip(_conv_rings(cache), snapshot, strict=True)
    ]
    treedef = jax.tree.structure([layer.conv for layer in (*cache.layers, *cache.drafts)])
    conv = jax.tree.unflatten(treedef, rings)
    layers = [layer._replace(conv=c) for layer, c in zip((*cache.layers, *cache.drafts), conv, strict=True)]
    return cache._replace(layers=tuple(layers[: len(cache.layers)]), drafts=tuple(layers[len(cache.layers) :]))


def _conv_rings(cache: Cache) -> list[jax.Array]:
    return jax.tree.leaves([layer.conv for layer in (*cache.layers, *cache.drafts)])
