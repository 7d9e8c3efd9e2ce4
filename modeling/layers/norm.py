"""RMSNorm, alone and fused with the residual add."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from modeling.layers.numerics import rounded


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, dtype: jnp.dtype) -> jax.Array:
    """Normalises the last axis in float32 and rounds once: `(x / rms(x)) * weight`; plain weight, not 1 + weight."""
    x = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return rounded(x * scale * weight.astype(jnp.float32), dtype)


class RMSNorm(nnx.Module):
    """RMSNorm over the last axis; `weight` is [size]."""

    def __init__(self, size: int, eps: float):
        self.weight = nnx.Param(jnp.zeros(size, jnp.bfloat16))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps, x.dtype)

    def add(self, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Adds a sublayer's output to the residual stream and normalises the sum.

        The norm reads the float32 sum, not its rounding.

        Args:
            x, residual: [..., size].

        Returns:
            The normalised sum and the new residual stream, both [..., size] in x's dtype.
        """
        total = x.astype(jnp.float32) + residual.astype(jnp.float32)
        return rms_norm(total, self.weight[...], self.eps, x.dtype), rounded(total, x.dtype)
