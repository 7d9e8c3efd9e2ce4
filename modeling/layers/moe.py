"""Mixture of experts: the two models' routers, with their shared experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from modeling.layers.experts import Experts, run_experts
from modeling.layers.linear import Linear
from modeling.layers.mlp import SwiGLU
from modeling.layers.numerics import dot32, rounded


class SparseMLP(nnx.Module):
    """Flint's MoE block: sigmoid router, top-k of the logits, one ungated shared expert.

    Attributes:
        gate: router weights [num_experts, hidden_size], float32 or bfloat16 as on disk.
        router_dtype: "float32" keeps weights, logits and routing weights in float32 (transformers); "bfloat16"
            rounds all three (vLLM, which calls it the reference's rule). They select different experts in about 4% of
            cases. Without effect in float32 compute, which never rounds.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        moe_intermediate_size: int,
        shared_expert_intermediate_size: int,
        norm_topk_prob: bool,
        weight_format: str,
        router_dtype: str,
    ):
        self.gate = nnx.Param(jnp.zeros((num_experts, hidden_size), jnp.dtype(router_dtype)))
        self.experts = Experts(num_experts, hidden_size, moe_intermediate_size, weight_format)
        self.shared_expert = SwiGLU(hidden_size, shared_expert_intermediate_size, weight_format)
        self.num_experts_per_tok = num_experts_per_tok
        self.norm_topk_prob = norm_topk_prob
        self.router_dtype = router_dtype

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [tokens, hidden_size] -> routing weights float32 and expert ids int32, each [tokens, num_experts_per_tok].

        Selection is on the logits (a float32 sigmoid saturates and would make ties); `lax.top_k` prefers the lowest
        index among equals, as the reference does.
        """
        round_router = self.router_dtype == "bfloat16" and x.dtype == jnp.bfloat16
        dtype = jnp.bfloat16 if round_router else jnp.float32
        logits = rounded(dot32("tk,ek->te", x.astype(dtype), self.gate[...]), dtype).astype(jnp.float32)
        top, expert_ids = lax.top_k(logits, self.num_experts_per_tok)
        scores = jax.nn.sigmoid(top)
        if self.norm_topk_prob:
            scores = scores / (scores.sum(-1, keepdims=True) + 1e-20)
        return rounded(scores, dtype).astype(jnp.float32), expert_ids

    def __call__(self, x: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        """x [..., hidden_size] -> [..., hidden_size].

        `valid` [...] marks the tokens that are not padding; what the others get is meaningless. None picks the
        differentiable definition.
        """
        tokens = x.reshape(-1, x.shape[-1])
        weights, expert_ids = self.route(tokens)
        routed = run_experts(self.experts, tokens, weights, expert_ids, None if valid is None else valid.reshape(-1))
        routed = rounded(routed, x.dtype).astype(jnp.float32)
        shared = self.shared_expert(tokens).astype(jnp.float32)
        return rounded(routed + shared, x.dtype).reshape(x.shape)


class SharedExperts(nnx.Module):
    """Experts that run on every token, each weighted before its down projection: Inkling, spec 3.8."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int):
        self.gate_proj = Linear(intermediate_size, hidden_size, "bf16", num_experts)
        self.up_proj = Linear(intermediate_size, hidden_size, "bf16", num_experts)
        self.down_proj = Linear(hidden_size, intermediate_size, "bf16", num_experts)
        self.num_experts = num_experts

    def __call__(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """x [tokens, hidden_size], weights float32 [tokens, num_experts] -> float32 [tokens, hidden_size]."""
        total = jnp.zeros(x.shape, jnp.float32)
        for expert in range(self.num_experts):
            at = jnp.int32(expert)
            gate, up = self.gate_proj.accumulate(x, at), self.up_proj.accumulate(x, at)
            activation = rounded(weights[:, expert, None] * (jax.nn.silu(gate) * up), x.dtype)
            total = total + self.down_proj.accumulate(activation, at)
        return total


class SinkMoE(nnx.Module):
    """Inkling's MoE block: the shared experts take part in the normalisation of the routing weights (spec 3.6 to 3.8).

    Attributes:
        gate: [num_experts + num_shared_experts, hidden_size], the shared experts' rows last.
        gate_bias: [num_experts] float32, moves the selection and nothing else.
        gate_scale: [1] float32, multiplies every weight, as route_scale does.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        num_shared_experts: int,
        moe_intermediate_size: int,
        route_scale: float,
        weight_format: str,
    ):
        self.gate = nnx.Param(jnp.zeros((num_experts + num_shared_experts, hidden_size), jnp.bfloat16))
        self.gate_bias = nnx.Param(jnp.zeros(num_experts, jnp.float32))
        self.gate_scale = nnx.Param(jnp.zeros(1, jnp.float32))
        self.experts = Experts(num_experts, hidden_size, moe_intermediate_size, weight_format, round_output=False)
        self.shared_experts = SharedExperts(num_shared_experts, hidden_size, moe_intermediate_size)
        self.num_experts_per_tok = num_experts_per_tok
        self.route_scale = route_scale

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [tokens, hidden_size] -> weights of the selected experts float32 [tokens, k], their ids int32, and the
        shared experts' weights float32 [tokens, num_shared_experts]. All weights of a token sum to the two scales.

        Logits and weights are float32; `lax.top_k` prefers the lowest index among equals, as the public engines do.
        """
        num_experts = self.gate_bias[...].shape[0]
        log_scores = jax.nn.log_sigmoid(dot32("tk,ek->te", x, self.gate[...]))
        routed, shared = log_scores[:, :num_experts], log_scores[:, num_experts:]
        _, expert_ids = lax.top_k(jnp.exp(routed) + self.gate_bias[...], self.num_experts_per_tok)
        active = jnp.concatenate([jnp.take_along_axis(routed, expert_ids, axis=1), shared], axis=1)
        weights = jax.nn.softmax(active, axis=1) * self.route_scale * self.gate_scale[...]
        return weights[:, : self.num_experts_per_tok], expert_ids, weights[:, self.num_experts_per_tok :]

    def __call__(self, x: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        """x [..., hidden_size] -> [..., hidden_size]; `valid` as for `SparseMLP`."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, expert_ids, shared_weights = self.route(tokens)
        routed = run_experts(self.experts, tokens, weights, expert_ids, None if valid is None else valid.reshape(-1))
        routed = rounded(routed, x.dtype).astype(jnp.float32)
        return rounded(routed + self.shared_experts(tokens, shared_weights), x.dtype).reshape(x.shape)
