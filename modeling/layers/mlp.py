"""SwiGLU MLP of dense layers and of Flint's shared expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from modeling.layers.linear import Linear
from modeling.layers.numerics import rounded


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) * up(x))`; gate and up are each rounded, the activation once more."""

    def __init__(self, hidden_size: int, intermediate_size: int, weight_format: str):
        self.gate_proj = Linear(intermediate_size, hidden_size, weight_format)
        self.up_proj = Linear(intermediate_size, hidden_size, weight_format)
        self.down_proj = Linear(hidden_size, intermediate_size, weight_format)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., hidden_size] -> [..., hidden_size]."""
        gate, up = self.gate_proj(x).astype(jnp.float32), self.up_proj(x).astype(jnp.float32)
        return self.down_proj(rounded(jax.nn.silu(gate) * up, x.dtype))
