"""Multi-token prediction: depths that each predict one token further than the one before (spec section 5).

Depth n takes, at row p, the hidden state that the depth before it made of row p (depth 0: the trunk's final hidden
state) and the embedding of token p + n + 1, and predicts token p + n + 2. Each depth is a whole decoder layer with a
cache of its own, in which row p is at position p, as in vLLM and SGLang; like the trunk's, its full layers scale query
and bias by position, as in SGLang (vLLM does not; it matters past 128,000 tokens and to acceptance alone).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from modeling.cache import Cache, LayerCache, PageTables, read_ring, write_ring
from modeling.inkling.config import InklingConfig, MTPConfig
from modeling.inkling.layer import DecoderLayer, Step, cached_layer
from modeling.layers.linear import Linear
from modeling.layers.norm import RMSNorm

if TYPE_CHECKING:
    from modeling.inkling.model import Inkling


class MTPLayer(nnx.Module):
    """One depth: both inputs normed, joined (hidden first) and projected, then a dense decoder layer."""

    def __init__(self, config: InklingConfig, kind: str):
        hidden = config.hidden_size
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.embed_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.input_proj = Linear(hidden, 2 * hidden, "bf16")
        self.block = DecoderLayer(config, kind, sparse=False)

    def join(self, hidden: jax.Array, embeds: jax.Array) -> jax.Array:
        """hidden, embeds [batch, rows, hidden_size] -> the block's input, of the same shape.

        `embeds` are the trunk's: normed by its embed_norm, or tower outputs. This depth norms them once more.
        """
        both = jnp.concatenate([self.hidden_norm(hidden), self.embed_norm(embeds)], axis=-1)
        return self.input_proj(both)


class MTP(nnx.Module):
    """All depths. `chain_norm` is None in published models: a block's raw output feeds the head and the next depth."""

    def __init__(self, config: InklingConfig, num_layers: int):
        mtp = config.mtp
        if not isinstance(mtp, MTPConfig) or num_layers > len(mtp.layer_types):
            raise ValueError(f"the config describes {len(mtp.layer_types) if mtp else 0} depths, not {num_layers}")
        self.layers = nnx.List(MTPLayer(config, kind) for kind in mtp.layer_types[:num_layers])
        self.chain_norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if mtp.chain_hidden_post_norm else None

    def run(
        self, depth: int, hidden: jax.Array, embeds: jax.Array, step: Step, cache: LayerCache | None
    ) -> tuple[jax.Array, LayerCache | None]:
        """One depth on rows [batch, rows, hidden_size]; its output is what the head and the next depth take."""
        layer = self.layers[depth]
        with jax.named_scope(f"mtp{depth}"):
            z = layer.join(hidden, embeds)
            h, cache = layer.block(z, step, None) if cache is None else cached_layer(layer.block, z, step, cache)
            return (h if self.chain_norm is None else self.chain_norm(h)), cache


def mtp_hidden(model: Inkling, hidden: jax.Array, embeds: jax.Array) -> list[jax.Array]:
    """Each depth's output over whole sequences, without a cache; differentiable. The definition.

    Args:
        hidden: the trunk's final hidden states [batch, seq, hidden_size]. embeds: its input embeddings, likewise.

    Returns:
        For depth n [batch, seq - 1 - n, hidden_size]: rows whose token p + n + 1 exists.
    """
    assert model.mtp is not None
    outs = []
    for depth in range(len(model.mtp.layers)):
        rows = hidden.shape[1] - 1
        hidden = hidden[:, :rows]
        step = Step.whole(hidden.shape[0], rows)
        hidden, _ = model.mtp.run(depth, hidden, embeds[:, depth + 1 : depth + 1 + rows], step, None)
        outs.append(hidden)
    return outs


def prefill_depths(
    model: Inkling, hidden: jax.Array, embeds: jax.Array, step: Step, cache: Cache
) -> tuple[list[jax.Array], Cache]:
    """Runs a prompt's chunk through the depths that the cache holds.

    Args:
        hidden: the trunk's final hidden states of the chunk [batch, chunk, hidden_size].
        embeds: its input embeddings [batch, chunk + depths, hidden_size], going that many tokens further. What is not
            known yet may be any finite values: the rows that use them are run again by `draft`.

    Returns:
        Each depth's outputs, like `hidden`, and the updated cache.
    """
    assert model.mtp is not None
    outs, layers = [], []
    for depth, layer_cache in enumerate(cache.drafts):
        ahead = embeds[:, depth + 1 : depth + 1 + hidden.shape[1]]
        hidden, layer_cache = model.mtp.run(depth, hidden, ahead, step, layer_cache)
        outs.append(hidden)
        layers.append(layer_cache)
    return outs, cache._replace(drafts=tuple(layers))


def remember(
    cache: Cache, hidden: jax.Array, embeds: jax.Array, slots: jax.Array, starts: jax.Array, lengths: jax.Array
) -> Cache:
    """Keeps what `draft` starts from of a chunk: final hidden states and input embeddings [batch, chunk, hidden]."""
    assert cache.rings is not None
    rings = cache.rings._replace(
        hidden=write_ring(cache.rings.hidden, slots, hidden, starts, lengths),
        embeds=write_ring(cache.rings.embeds, slots, embeds, starts, lengths),
    )
    return cache._replace(rings=rings)


def draft(
    model: Inkling, tokens: jax.Array, lengths: jax.Array, active: jax.Array, pages: PageTables, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Drafts as many tokens as the cache has depths, each the most likely one.

    Depth n's last n rows are computed from drafts, and are wrong wherever those are rejected. So every depth runs on
    the last num_drafts + 1 rows each time, which covers all that may be wrong whatever was accepted, and overwrites
    what they left in the cache; a row that leaves this span has seen nothing but verified tokens.

    Args:
        tokens: [batch], the newest token of each row, not yet in the cache.
        lengths: [batch], tokens in the cache. active: [batch] bool; other rows draft nothing useful.

    Returns:
        Drafts [batch, num_drafts] int32, and the updated cache.
    """
    assert model.mtp is not None and cache.rings is not None
    num_drafts = len(cache.drafts)
    starts = lengths - (num_drafts + 1)
    positions = starts[:, None] + jnp.arange(num_drafts + 1)
    valid = (positions >= 0) & active[:, None]
    # Rows before the sequence are skipped: the chunk then starts with them as padding.
    step = Step(positions, valid, starts, jnp.where(active, num_drafts + 1, 0), pages)
    hidden = read_ring(cache.rings.hidden, pages.slot, positions)
    embeds = read_ring(cache.rings.embeds, pages.slot, positions[:, 1:])
    drafts, layers = [], []
    for depth, layer_cache in enumerate(cache.drafts):
        embeds = jnp.concatenate([embeds, model.embedded(tokens[:, None])], axis=1)
        hidden, layer_cache = model.mtp.run(depth, hidden, embeds[:, depth:], step, layer_cache)
        tokens = jnp.argmax(model.logits(hidden[:, -1]), axis=-1).astype(jnp.int32)
        drafts.append(tokens)
        layers.append(layer_cache)
    return jnp.stack(drafts, axis=1), cache._replace(drafts=tuple(layers))
