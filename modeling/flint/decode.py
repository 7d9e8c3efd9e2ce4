"""Flint's decode step from fused kernels: one new token a row, at most eight rows, bfloat16.

Six launches a layer for one token, seven for more, instead of some thirty:

    dense_gemv          residual add, input norm, q, k and v projections
    decode_attention    head norms, RoPE, cache write, attention in splits
    dense_gemv          o projection
    router              residual add, post-attention norm, router logits
    moe.gate_up         top-k, then gate and up of the selected experts and the shared expert
    moe.down            their down projections, weighted sum, shared expert's output

What it computes, roundings included, is `Flint.forward` on a chunk of one; only float32 sums run in another order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from modeling.batch import Batch
from modeling.cache import Cache, LayerCache
from modeling.flint.config import SLIDING
from modeling.layers.linear import Linear
from modeling.layers.moe import SparseMLP
from modeling.layers.rope import rope_angles
from pallas_kernels import moe
from pallas_kernels.decode_attention import decode_attention, new_counters
from pallas_kernels.dense_gemv import Matrix, dense_gemv
from pallas_kernels.router import router

if TYPE_CHECKING:
    from modeling.flint.model import DecoderLayer, Flint


@dataclasses.dataclass(frozen=True)
class Kernels:
    """How the kernels run: on the GPU, interpreted (slowly, anywhere), or their references in their place."""

    implementation: str = "triton"
    interpret: bool = False

    @property
    def how(self) -> dict:
        """What every kernel wants to know."""
        return dict(implementation=self.implementation, interpret=self.interpret)


class Counters(NamedTuple):
    """By which the programs of a launch know which of them is the last; zeros between launches."""

    attention: jax.Array
    moe: jax.Array


def decode(model: Flint, batch: Batch, cache: Cache, kernels: Kernels) -> tuple[jax.Array, Cache]:
    """As `Flint.forward`, for chunks of one token."""
    config, positions, valid = model.config, batch.starts, batch.lengths > 0
    x, stream = model.embed_tokens(batch.tokens[:, 0], model.dtype), None  # no residual before the first layer
    rope = rope_angles(positions, config.head_dim, config.rope_theta)
    layers = []
    counters = Counters(new_counters(len(positions), config.num_key_value_heads), moe.new_counters(config.hidden_size))
    for i, layer in enumerate(model.layers):
        sliding = config.layer_types[i] == SLIDING
        table = batch.pages.window if sliding else batch.pages.full
        x, stream, layer_cache, counters = _layer(
            kernels, layer, x, stream, cache.layers[i], table, positions, valid, rope if sliding else None, counters
        )
        layers.append(layer_cache)
    assert stream is not None
    y, _ = model.norm.add(x, stream)
    return y[:, None], cache._replace(layers=tuple(layers))


def logits(model: Flint, hidden: jax.Array, kernels: Kernels) -> jax.Array:
    """As `Flint.logits`, for at most eight rows [rows, hidden_size]."""
    [out] = dense_gemv(hidden, [_matrix(model.lm_head)], out_dtype=jnp.float32, **kernels.how)
    return out


@functools.partial(jax.jit, static_argnums=0, inline=False)
def _layer(
    kernels: Kernels,
    layer: DecoderLayer,
    x,
    stream,
    cache: LayerCache,
    table,
    positions,
    valid,
    rope,
    counters: Counters,
) -> tuple[jax.Array, jax.Array, LayerCache, Counters]:
    """One layer. Jitted on its own so that layers of one kind are traced once. `stream` is None before the first."""
    how = kernels.how
    attention, norm = layer.self_attn, layer.input_layernorm
    with jax.named_scope("attention"):
        projections = [_matrix(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        normed = dict(norm_weight=norm.weight[...], norm_eps=norm.eps)
        if stream is None:
            [qkv], stream = dense_gemv(x, projections, **normed, **how), x
        else:
            qkv, stream = dense_gemv(x, projections, residual=stream, **normed, **how)
        out, k, v, for_attention = decode_attention(
            qkv,
            attention.q_norm.weight[...],
            attention.k_norm.weight[...],
            rope,
            attention.sinks[...],
            cache.k,
            cache.v,
            table,
            positions,
            valid,
            counters.attention,
            window=attention.window,
            eps=attention.q_norm.eps,
            **how,
        )
        [x] = dense_gemv(out, [_matrix(attention.o_proj)], **how)
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    with jax.named_scope("mlp"):
        if isinstance(mlp, SparseMLP):
            x, stream, for_moe = _sparse(kernels, mlp, x, stream, norm.weight[...], norm.eps, valid, counters.moe)
        else:
            normed = dict(residual=stream, norm_weight=norm.weight[...], norm_eps=norm.eps, activation="swiglu")
            act, stream = dense_gemv(x, [_matrix(mlp.gate_proj), _matrix(mlp.up_proj)], **normed, **how)
            [x] = dense_gemv(act, [_matrix(mlp.down_proj)], **how)
            for_moe = counters.moe
    return x, stream, cache._replace(k=k, v=v), Counters(for_attention, for_moe)


def _sparse(
    kernels: Kernels, mlp: SparseMLP, x, stream, norm_weight, eps: float, valid, counters
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The MoE block with the add and norm before it: output, stream, counters. Idle rows select no expert."""
    how, rounds, gate = kernels.how, mlp.router_dtype == "bfloat16", mlp.gate[...]
    logits, y, stream = router(x, stream, norm_weight, gate, norm_eps=eps, round_logits=rounds, **how)
    experts, shared = mlp.experts, mlp.shared_expert
    activations, shared_activations, ids, count, weights = moe.gate_up(
        y,
        logits,
        (_matrix(experts.gate_proj), _matrix(experts.up_proj)),
        (_matrix(shared.gate_proj), _matrix(shared.up_proj)),
        top_k=mlp.num_experts_per_tok,
        normalise=mlp.norm_topk_prob,
        round_weights=rounds,
        valid=valid,
        **how,
    )
    matrices = _matrix(experts.down_proj), _matrix(shared.down_proj)
    arguments = (activations, shared_activations, ids, count, weights, counters, *matrices)
    x, counters = moe.down(*arguments, top_k=mlp.num_experts_per_tok, **how)
    return x, stream, counters


def _matrix(linear: Linear) -> Matrix:
    if linear.weight_format == "bf16":
        return Matrix(linear.weight[...])
    return Matrix(linear.codes[...], linear.scales[...], linear.global_scale[...])
