"""What the MoE kernels compute, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dense_gemv.reference import accumulate, rounded


def gate_up(x, logits, experts, shared, *, top_k, normalise, round_weights, valid=None):
    """See `pallas_kernels.moe.gate_up`."""
    num_tokens, num_experts = logits.shape
    num_slots = min(num_tokens * top_k, num_experts)
    top, chosen = lax.top_k(logits, top_k)
    scores = jax.nn.sigmoid(top)
    if normalise:
        scores = scores / (scores.sum(-1, keepdims=True) + 1e-20)
    scores = rounded(scores, jnp.bfloat16 if round_weights else jnp.float32).astype(jnp.float32)
    if valid is not None and num_tokens > 1:
        scores, chosen = jnp.where(valid[:, None], scores, 0), jnp.where(valid[:, None], chosen, num_experts)
    by_expert = jnp.zeros((num_tokens, num_experts), jnp.float32)
    by_expert = by_expert.at[jnp.arange(num_tokens)[:, None], chosen].set(scores, mode="drop")
    used = jnp.zeros(num_experts, bool).at[chosen.reshape(-1)].set(True, mode="drop")
    # Used experts first, ascending; one token's as they were selected.
    order = chosen[0] if num_tokens == 1 else jnp.argsort(~used, stable=True)[:num_slots]
    count = used.sum().astype(jnp.int32)[None]
    ids = jnp.where(jnp.arange(num_slots) < count, order, -1).astype(jnp.int32)
    slots = [jnp.maximum(expert, 0) for expert in ids]
    out = []
    for expert in slots:
        gate, up = (accumulate(x, matrix, expert) for matrix in experts)
        out.append(rounded(jax.nn.silu(gate) * up, jnp.bfloat16))
    gate, up = (rounded(accumulate(x, matrix), jnp.bfloat16).astype(jnp.float32) for matrix in shared)
    shared_out = rounded(jax.nn.silu(gate) * up, jnp.bfloat16)
    weights = jnp.where((ids >= 0)[:, None], by_expert.T[jnp.maximum(ids, 0)], 0.0)
    return [jnp.stack(out), shared_out, ids, count, weights]


def down(activations, shared_activations, ids, count, weights, experts, shared):
    """See `pallas_kernels.moe.down`."""
    del count
    total = jnp.zeros((activations.shape[1], experts.weight.shape[1]), jnp.float32)
    for x, expert, weight in zip(activations, ids, weights, strict=True):
        rows = rounded(accumulate(x, experts, jnp.maximum(expert, 0)), jnp.bfloat16).astype(jnp.float32)
        total = total + jnp.where((expert >= 0) & (weight != 0)[:, None], weight[:, None] * rows, 0.0)
    routed = rounded(total, jnp.bfloat16).astype(jnp.float32)
    shared_rows = rounded(accumulate(shared_activations, shared), jnp.bfloat16).astype(jnp.float32)
    return rounded(routed + shared_rows, jnp.bfloat16)
