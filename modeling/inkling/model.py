"""Inkling in Flax NNX (tree mode): modules hold parameters only; caches and positions are passed in and returned.

Two ways to run it share every layer:

* `model(tokens)` is the definition: no cache, dense attention, every expert on every token, differentiable.
* `model.forward(batch, cache)` is what the engine, the scorer and the benchmarks jit: one chunk of each row against a
  cache. A decode step is a chunk of one token, or of one and the drafts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from modeling.batch import Batch, MediaRows
from modeling.cache import Cache
from modeling.inkling.config import InklingConfig
from modeling.inkling.layer import DecoderLayer, Step, cached_layer
from modeling.inkling.mtp import MTP
from modeling.inkling.towers import AudioTower, VisionTower
from modeling.layers.embedding import Embedding
from modeling.layers.linear import Linear
from modeling.layers.norm import RMSNorm


class Inkling(nnx.Module):
    """The whole model. Made abstractly (`Inkling.abstract`), filled by a loader or by `random_parameters`.

    Args:
        dtype: compute dtype. bfloat16 follows the spec's rounding points; float32 rounds nowhere.
        expert_formats: "bf16" or "nvfp4" a trunk layer, for its routed experts; None means all "bf16". Everything else
            is bf16. Entries of dense layers mean nothing.
        num_mtp_layers: drafting depths present.
        vision: (out, in) features of the vision tower's linear layers, in order; empty without one. audio: whether
            there is an audio tower.
    """

    def __init__(
        self,
        config: InklingConfig,
        dtype: Any = jnp.bfloat16,
        expert_formats: tuple[str, ...] | None = None,
        num_mtp_layers: int = 0,
        vision: tuple[tuple[int, int], ...] = (),
        audio: bool = False,
    ):
        formats = expert_formats or ("bf16",) * config.num_hidden_layers
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.embed_norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if config.use_embed_norm else None
        self.layers = nnx.List(
            DecoderLayer(config, *layer)
            for layer in zip(config.layer_types, config.sparse_layers, formats, strict=True)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.unembed = Linear(config.vocab_size, config.hidden_size, "bf16")
        self.mtp = MTP(config, num_mtp_layers) if num_mtp_layers else None
        eps = config.rms_norm_eps
        self.vision = VisionTower(config.vision, vision, eps) if config.vision and vision else None
        self.audio = AudioTower(config.audio, config.hidden_size, eps) if config.audio and audio else None
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.expert_formats = formats
        self.num_mtp_layers = num_mtp_layers

    @classmethod
    def abstract(cls, config: InklingConfig, **options: Any) -> Inkling:
        """The model with `jax.ShapeDtypeStruct` leaves: its shape table. Allocates nothing, at any size."""
        return nnx.eval_shape(lambda: cls(config, **options))

    def embedded(self, tokens: jax.Array, media: MediaRows | None = None) -> jax.Array:
        """tokens [..., chunk] -> the stream's start [..., chunk, hidden_size].

        Tower outputs replace the embeddings of their placeholders, and do not pass through `embed_norm`.
        """
        h = self.embed(tokens, self.dtype)
        if self.embed_norm is not None:
            h = self.embed_norm(h)
        if media is not None:
            h = jnp.where(media.here[..., None], media.embeds.astype(h.dtype), h)
        return h

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final hidden states [..., hidden_size] to float32 logits [..., kept_vocab_size].

        The width multiplier divides the float32 accumulator; the padded rows of the head are cut off.
        """
        with jax.named_scope("unembed"):
            logits = self.unembed.accumulate(hidden) / self.config.logits_mup_width_multiplier
            return logits[..., : self.config.kept_vocab_size]

    def hidden(self, tokens: jax.Array, media: MediaRows | None = None) -> jax.Array:
        """tokens [batch, seq] -> final hidden states [batch, seq, hidden_size], without a cache; differentiable."""
        h, step = self.embedded(tokens, media), Step.whole(*tokens.shape)
        for layer in self.layers:
            h, _ = layer(h, step, None)
        return self.norm(h)

    def __call__(self, tokens: jax.Array, media: MediaRows | None = None) -> jax.Array:
        """tokens [batch, seq] int32 -> float32 logits [batch, seq, kept_vocab_size]. The definition; differentiable."""
        return self.logits(self.hidden(tokens, media))

    def forward(self, batch: Batch, cache: Cache) -> tuple[jax.Array, Cache]:
        """Runs one chunk of each row and writes what later tokens need of it to the cache.

        Args:
            batch: the chunk; rows may have different lengths and starts.
            cache: donate it where this is jitted.

        Returns:
            Final hidden states [batch, chunk, hidden_size] (rows past `lengths` are meaningless) and the updated cache.
        """
        h, step, layers = self.embedded(batch.tokens, batch.media), Step.of(batch), []
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            h, layer_cache = cached_layer(layer, h, step, layer_cache)
            layers.append(layer_cache)
        with jax.named_scope("final_norm"):
            return self.norm(h), cache._replace(layers=tuple(layers))
