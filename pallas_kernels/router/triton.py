"""Residual add, norm and router logits for up to eight tokens: Pallas, Triton lowering.

One program computes the logits of a few experts; each adds and normalises for itself, which costs less than a launch
more. The products are float32 multiply-adds, not tensor core products: a router kept in float32 decides on them.

Roofline: 1 MB (BF16) or 2 MB (float32) of weights at Flint's size, under half a microsecond: it is all latency.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Tunable sizes: experts a program, and warps."""

    experts: int = 2
    num_warps: int = 8


def router(x, residual, norm_weight, gate, *, norm_eps, round_logits, blocks, interpret):
    """See `pallas_kernels.router.router`."""
    num_tokens, hidden = x.shape
    num_experts = gate.shape[0]
    padded = (pl.next_power_of_2(num_tokens), pl.next_power_of_2(hidden))

    def kernel(x_ref, residual_ref, norm_ref, gate_ref, logits_ref, normed_ref, stream_ref):
        token, column = (lax.broadcasted_iota(jnp.int32, padded, axis) for axis in range(2))
        columns = lax.broadcasted_iota(jnp.int32, padded[1:], 0)
        inside = (token < num_tokens) & (column < hidden)
        first = pl.program_id(0) * blocks.experts
        rows = [
            _load(gate_ref, (first + i, columns), (columns < hidden) & (first + i < num_experts))
            for i in range(blocks.experts)
        ]
        total = _load(x_ref, (token, column), inside) + _load(residual_ref, (token, column), inside)
        scale = lax.rsqrt((total * total).sum(axis=1, keepdims=True) / hidden + norm_eps)
        normed = (total * scale * _load(norm_ref, (columns,), columns < hidden)[None]).astype(jnp.bfloat16)
        for i, row in enumerate(rows):
            logits = (normed.astype(jnp.float32) * row[None]).sum(axis=1)
            if round_logits:
                logits = logits.astype(jnp.bfloat16).astype(jnp.float32)
            tokens = lax.broadcasted_iota(jnp.int32, padded[:1], 0)
            fits = (tokens < num_tokens) & (first + i < num_experts)
            plt.store(logits_ref.at[tokens, first + i], logits, mask=fits)
        once = inside & (first == 0)
        plt.store(normed_ref.at[token, column], normed, mask=once)
        plt.store(stream_ref.at[token, column], total.astype(jnp.bfloat16), mask=once)

    out_shape = [
        jax.ShapeDtypeStruct((num_tokens, num_experts), jnp.float32),
        *[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
    ]
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(num_experts, blocks.experts),),
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
        interpret=interpret,
        name="router",
    )(x, residual, norm_weight, gate)


def _load(ref, at, fits):
    return plt.load(ref.at[at], mask=fits, other=jnp.zeros((), ref.dtype)).astype(jnp.float32)
