"""One decoder layer of Inkling (spec section 3.3), as the trunk and the drafting depths use it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from modeling.batch import Batch
from modeling.cache import LayerCache, PageTables, write_pages
from modeling.inkling.config import SLIDING, InklingConfig
from modeling.layers.attention import dense_attention, paged_attention
from modeling.layers.linear import Linear
from modeling.layers.mlp import SwiGLU
from modeling.layers.moe import SinkMoE
from modeling.layers.norm import RMSNorm
from modeling.layers.numerics import dot32, rounded
from modeling.layers.sconv import ShortConv


class Step(NamedTuple):
    """Where a chunk's tokens are.

    Attributes:
        positions: [batch, chunk] int32.
        valid: [batch, chunk] bool, the real tokens; None with a definition that has no padding.
        starts, lengths, pages: see `modeling.batch.Batch`; None without a cache.
    """

    positions: jax.Array
    valid: jax.Array | None = None
    starts: jax.Array | None = None
    lengths: jax.Array | None = None
    pages: PageTables | None = None

    @classmethod
    def whole(cls, batch: int, tokens: int) -> Step:
        """Sequences from their start, without a cache."""
        return cls(jnp.broadcast_to(jnp.arange(tokens), (batch, tokens)))

    @classmethod
    def chunk(cls, starts: jax.Array, lengths: jax.Array, pages: PageTables, tokens: int) -> Step:
        """`tokens` of each row from `starts` [batch] on, of which `lengths` [batch] are real."""
        offsets = jnp.arange(tokens)
        return cls(starts[:, None] + offsets, offsets < lengths[:, None], starts, lengths, pages)

    @classmethod
    def of(cls, batch: Batch) -> Step:
        """The step of a batch."""
        return cls.chunk(batch.starts, batch.lengths, batch.pages, batch.tokens.shape[1])


def log_scale(positions: jax.Array, floor: int | None, alpha: float) -> jax.Array:
    """What multiplies query and relative bias of full layers, by position: float32, 1 up to `floor` tokens."""
    if floor is None:
        return jnp.ones(positions.shape, jnp.float32)
    return 1 + alpha * jnp.log(jnp.maximum((positions + 1).astype(jnp.float32) / floor, 1.0))


class Attention(nnx.Module):
    """Grouped-query attention without rotary positions: a learned bias by distance, short convolutions on k and v.

    Keys are normalised after their convolution; values are not. The scale is 1 / head_dim.
    """

    def __init__(self, config: InklingConfig, kind: str):
        heads, kv_heads, d = config.num_heads(kind), config.num_kv_heads(kind), config.head_dim_of(kind)
        hidden, width = config.hidden_size, config.conv_kernel_size
        self.q_proj = Linear(heads * d, hidden, "bf16")
        self.k_proj = Linear(kv_heads * d, hidden, "bf16")
        self.v_proj = Linear(kv_heads * d, hidden, "bf16")
        self.r_proj = Linear(heads * config.d_rel, hidden, "bf16")
        self.o_proj = Linear(hidden, heads * d, "bf16")
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_sconv = ShortConv(kv_heads * d, width)
        self.v_sconv = ShortConv(kv_heads * d, width)
        self.rel_proj = nnx.Param(jnp.zeros((config.d_rel, config.extent(kind)), jnp.bfloat16))
        self.head_dim, self.d_rel = d, config.d_rel
        self.sliding = kind == SLIDING
        self.window = config.sliding_window if self.sliding else None
        self.log_scaling = None if self.sliding else (config.log_scaling_n_floor, config.log_scaling_alpha)

    def __call__(self, x: jax.Array, step: Step, cache: LayerCache | None) -> tuple[jax.Array, LayerCache | None]:
        """x [batch, tokens, hidden_size] -> the same shape, and the layer's cache."""
        k, cache = convolve(self.k_sconv, "k", self.k_proj(x), step, cache)
        v, cache = convolve(self.v_sconv, "v", self.v_proj(x), step, cache)
        q, k, v = (y.reshape(*x.shape[:2], -1, self.head_dim) for y in (self.q_proj(x), k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        r = self.r_proj(x).reshape(*x.shape[:2], -1, self.d_rel)
        rel = rounded(dot32("bthd,dr->bthr", r, self.rel_proj[...]), x.dtype)
        if self.log_scaling is not None:
            tau = log_scale(step.positions, *self.log_scaling)[..., None, None]
            q, rel = (rounded(y.astype(jnp.float32) * tau, x.dtype) for y in (q, rel))
        scale = 1 / self.head_dim
        if cache is None:
            out = dense_attention(q, k, v, None, step.positions, self.window, rel=rel, scale=scale)
        else:
            assert step.pages is not None and step.valid is not None
            table = step.pages.window if self.sliding else step.pages.full
            cache = write_pages(cache, k, v, table, step.positions, step.valid)
            out = paged_attention(q, cache, None, table, step.positions, step.valid, self.window, rel=rel, scale=scale)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), cache


def convolve(
    sconv: ShortConv, stream: str, x: jax.Array, step: Step, cache: LayerCache | None
) -> tuple[jax.Array, LayerCache | None]:
    """A short convolution of the chunk after what its ring holds; `stream` is a field of `ConvRings`."""
    if cache is None:
        return sconv.start(x), None
    rings = cache.conv
    assert rings is not None and step.pages is not None and step.starts is not None and step.lengths is not None
    y, ring = sconv.cached(x, getattr(rings, stream), step.pages.slot, step.starts, step.lengths)
    return y, cache._replace(conv=rings._replace(**{stream: ring}))


class DenseMLP(SwiGLU):
    """SwiGLU times a scalar, which multiplies the rounded product (spec 3.5)."""

    def __init__(self, config: InklingConfig):
        super().__init__(config.hidden_size, config.intermediate_size, "bf16")
        self.output_scale = nnx.Param(jnp.zeros(1, jnp.bfloat16))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., hidden_size] -> [..., hidden_size]."""
        y = super().__call__(x)
        return rounded(y.astype(jnp.float32) * self.output_scale[...].astype(jnp.float32), x.dtype)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each between a norm and a short convolution; the stream is rounded after each."""

    def __init__(self, config: InklingConfig, kind: str, sparse: bool, expert_format: str = "bf16"):
        hidden = config.hidden_size
        self.attn_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.attn = Attention(config, kind)
        self.attn_sconv = ShortConv(hidden, config.conv_kernel_size)
        self.mlp_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.mlp = (
            SinkMoE(
                hidden,
                config.num_experts,
                config.num_experts_per_tok,
                config.num_shared_experts,
                config.moe_intermediate_size,
                config.route_scale,
                expert_format,
            )
            if sparse
            else DenseMLP(config)
        )
        self.mlp_sconv = ShortConv(hidden, config.conv_kernel_size)

    def __call__(self, h: jax.Array, step: Step, cache: LayerCache | None) -> tuple[jax.Array, LayerCache | None]:
        """The residual stream h [batch, tokens, hidden_size] after this layer, and the layer's cache."""
        with jax.named_scope("attention"):
            u, cache = self.attn(self.attn_norm(h), step, cache)
            u, cache = convolve(self.attn_sconv, "attn", u, step, cache)
            h = add(h, u)
        with jax.named_scope("mlp"):
            m = self.mlp_norm(h)
            y = self.mlp(m, step.valid) if isinstance(self.mlp, SinkMoE) else self.mlp(m)
            y, cache = convolve(self.mlp_sconv, "mlp", y, step, cache)
            h = add(h, y)
        return h, cache


def add(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum of two streams, rounded once."""
    return rounded(a.astype(jnp.float32) + b.astype(jnp.float32), a.dtype)


@functools.partial(jax.jit, inline=False)
def cached_layer(layer: DecoderLayer, h: jax.Array, step: Step, cache: LayerCache):
    """One layer against its cache. Jitted on its own so that layers of one kind are traced once."""
    return layer(h, step, cache)
