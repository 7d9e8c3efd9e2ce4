"""Token embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Embedding(nnx.Module):
    """Token embedding, `weight` [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int):
        self.weight = nnx.Param(jnp.zeros((vocab_size, hidden_size), jnp.bfloat16))

    def __call__(self, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return self.weight[...][tokens].astype(dtype)
