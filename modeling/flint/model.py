"""Flint in Flax NNX (tree mode): modules hold parameters only; caches and positions are passed in and returned.

Two ways to run it share every layer:

* `model(tokens)` is the definition: no cache, dense attention, every expert on every token, differentiable.
* `model.forward(batch, cache)` is what the engine, the scorer and the benchmarks jit: one chunk of each row against
  a paged cache. A decode step is a chunk of one token; with `decode_kernels` it runs as fused kernels
  (`modeling.flint.decode`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from modeling.batch import Batch
from modeling.cache import Cache, LayerCache, write_pages
from modeling.flint import decode
from modeling.flint.config import SLIDING, FlintConfig
from modeling.layers.attention import dense_attention, paged_attention
from modeling.layers.embedding import Embedding
from modeling.layers.linear import Linear
from modeling.layers.mlp import SwiGLU
from modeling.layers.moe import SparseMLP
from modeling.layers.norm import RMSNorm
from modeling.layers.rope import apply_rope, rope_angles
from pallas_kernels.warp_tiles import MAX_TOKENS

# q [batch, tokens, heads, head_dim], k, v [batch, tokens, kv_heads, head_dim], sinks [heads], window ->
# output like q, and the layer's updated cache (None without one).
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, int | None], tuple[jax.Array, LayerCache | None]]


class Attention(nnx.Module):
    """Grouped-query attention: per-head RMSNorm of q and k, RoPE on sliding layers only, a sink a query head."""

    def __init__(self, config: FlintConfig, layer: int, weight_format: str):
        heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = Linear(heads * d, config.hidden_size, weight_format)
        self.k_proj = Linear(kv_heads * d, config.hidden_size, weight_format)
        self.v_proj = Linear(kv_heads * d, config.hidden_size, weight_format)
        self.o_proj = Linear(config.hidden_size, heads * d, weight_format)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)
        self.sinks = nnx.Param(jnp.zeros(heads, jnp.float32))
        self.head_dim = d
        self.rotary = config.layer_types[layer] == SLIDING
        self.window = config.window(layer)

    def __call__(
        self, x: jax.Array, angles: tuple[jax.Array, jax.Array], attend: Attend
    ) -> tuple[jax.Array, LayerCache | None]:
        """x [batch, tokens, hidden_size] -> the same shape, and the layer's cache."""
        q, k, v = (proj(x).reshape(*x.shape[:2], -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = apply_rope(q, *angles), apply_rope(k, *angles)
        out, cache = attend(q, k, v, self.sinks[...], self.window)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), cache


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm that also carries the residual add of the sublayer before it."""

    def __init__(self, config: FlintConfig, layer: int, weight_format: str, router_dtype: str):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, weight_format)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.sparse_layers[layer]:
            self.mlp = SparseMLP(
                config.hidden_size,
                config.num_experts,
                config.num_experts_per_tok,
                config.moe_intermediate_size,
                config.shared_expert_intermediate_size,
                config.norm_topk_prob,
                weight_format,
                router_dtype,
            )
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, weight_format)

    def __call__(
        self,
        x: jax.Array,
        residual: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        attend: Attend,
        valid: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, LayerCache | None]:
        """x is the last sublayer's output, `residual` the stream before it; both [batch, tokens, hidden_size].

        `valid` [batch, tokens] marks real tokens; None runs the definition (see `SparseMLP`).
        """
        with jax.named_scope("attention"):
            y, residual = self.input_layernorm.add(x, residual)
            x, cache = self.self_attn(y, angles, attend)
        with jax.named_scope("mlp"):
            y, residual = self.post_attention_layernorm.add(x, residual)
            x = self.mlp(y, valid) if isinstance(self.mlp, SparseMLP) else self.mlp(y)
        return x, residual, cache


class Flint(nnx.Module):
    """The whole model. Made abstractly (`Flint.abstract`), filled by a loader or by `random_parameters`.

    Attributes:
        dtype: compute dtype. bfloat16 follows the reference's rounding points; float32 rounds nowhere.
        weight_format: "bf16" or "nvfp4" (packed linear layers, the LM head included).
        router_dtype: see `SparseMLP`.
        decode_kernels: how steps of one token and at most eight rows run; None for plain XLA. See `modeling.kernels`.
        num_mtp_layers, vision, audio: what Flint does not have, for callers that run either model.
    """

    num_mtp_layers = 0
    vision = audio = None

    def __init__(
        self,
        config: FlintConfig,
        dtype: jnp.dtype = jnp.bfloat16,
        weight_format: str = "bf16",
        router_dtype: str = "float32",
    ):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List(
            DecoderLayer(config, layer, weight_format, router_dtype) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.vocab_size, config.hidden_size, weight_format)
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.weight_format = weight_format
        self.decode_kernels: decode.Kernels | None = None

    @classmethod
    def abstract(cls, config: FlintConfig, **options) -> Flint:
        """The model with `jax.ShapeDtypeStruct` leaves: its shape table. Allocates nothing, at any size."""
        return nnx.eval_shape(lambda: cls(config, **options))

    def embed(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Input of the first layer: no sublayer output yet, and the embeddings as the residual stream."""
        residual = self.embed_tokens(tokens, self.dtype)
        return jnp.zeros_like(residual), residual

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final hidden states [..., hidden_size] to float32 logits [..., vocab_size]."""
        *lead, size = hidden.shape
        with jax.named_scope("lm_head"):
            if self.decode_kernels and math.prod(lead) <= MAX_TOKENS:
                return decode.logits(self, hidden.reshape(-1, size), self.decode_kernels).reshape(*lead, -1)
            return self.lm_head.accumulate(hidden)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens [batch, seq] int32 -> float32 logits [batch, seq, vocab_size], without a cache; differentiable."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def attend(q, k, v, sinks, window):
            return dense_attention(q, k, v, sinks, positions, window), None

        x, residual = self.embed(tokens)
        angles = rope_angles(positions, self.config.head_dim, self.config.rope_theta)
        for layer in self.layers:
            x, residual, _ = layer(x, residual, angles, attend, valid=None)
        y, _ = self.norm.add(x, residual)
        return self.lm_head.accumulate(y)

    def forward(self, batch: Batch, cache: Cache) -> tuple[jax.Array, Cache]:
        """Runs one chunk of each row and writes its keys and values to the cache.

        Args:
            batch: the chunk; rows may have different lengths and starts.
            cache: donate it where this is jitted.

        Returns:
            Final hidden states [batch, chunk, hidden_size] (rows past `lengths` are meaningless) and the updated cache.
        """
        rows, chunk = batch.tokens.shape
        if self.decode_kernels and chunk == 1 and rows <= MAX_TOKENS:
            return decode.decode(self, batch, cache, self.decode_kernels)
        positions = batch.starts[:, None] + jnp.arange(chunk)
        valid = jnp.arange(chunk) < batch.lengths[:, None]
        angles = rope_angles(positions, self.config.head_dim, self.config.rope_theta)
        (x, residual), layers = self.embed(batch.tokens), []
        for i, layer in enumerate(self.layers):
            table = batch.pages.window if self.config.layer_types[i] == SLIDING else batch.pages.full
            x, residual, layer_cache = _cached_layer(
                layer, x, residual, cache.layers[i], table, positions, valid, angles
            )
            layers.append(layer_cache)
        with jax.named_scope("final_norm"):
            y, _ = self.norm.add(x, residual)
        return y, cache._replace(layers=tuple(layers))


@functools.partial(jax.jit, inline=False)
def _cached_layer(layer: DecoderLayer, x, residual, cache: LayerCache, table, positions, valid, angles):
    """One layer against its pages. Jitted on its own so that layers of one kind are traced once."""

    def attend(q, k, v, sinks, window):
        new_cache = write_pages(cache, k, v, table, positions, valid)
        return paged_attention(q, new_cache, sinks, table, positions, valid, window), new_cache

    return layer(x, residual, angles, attend, valid)
