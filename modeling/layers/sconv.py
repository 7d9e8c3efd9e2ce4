"""Inkling's short convolution: depthwise, causal, over the last few tokens, with its own residual (spec section 4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from modeling.cache import read_ring, write_ring
from modeling.layers.numerics import rounded


class ShortConv(nnx.Module):
    """`y_t = x_t + sum_i weight[:, i] * x_{t - (width - 1) + i}`: the last tap is the token itself.

    In float32 whatever the compute dtype, with one rounding at the end. `weight` is [channels, width].
    """

    def __init__(self, channels: int, width: int):
        self.weight = nnx.Param(jnp.zeros((channels, width), jnp.bfloat16))

    def __call__(self, x: jax.Array, history: jax.Array) -> jax.Array:
        """x [batch, tokens, channels] after `history` [batch, width - 1, channels], the raw inputs before it."""
        weight = self.weight[...].astype(jnp.float32)
        padded = jnp.concatenate([history.astype(x.dtype), x], axis=1).astype(jnp.float32)
        total = jnp.zeros(x.shape, jnp.float32)
        for tap in range(weight.shape[1]):
            total = total + weight[:, tap] * padded[:, tap : tap + x.shape[1]]
        return rounded(x.astype(jnp.float32) + total, x.dtype)

    def start(self, x: jax.Array) -> jax.Array:
        """x [batch, tokens, channels] from the start of its sequences, where nothing precedes."""
        width = self.weight[...].shape[1]
        return self(x, jnp.zeros((x.shape[0], width - 1, x.shape[2]), x.dtype))

    def cached(
        self, x: jax.Array, ring: jax.Array, slots: jax.Array, starts: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """A chunk of each row against the rings of raw inputs, see `modeling.cache`: the result and the updated rings.

        Args:
            x: [batch, chunk, channels], of which `lengths` [batch] are real, from position `starts` [batch] on. A
                chunk may begin before its sequence does; what is there counts as zero.
            ring: [num_slots, ring, channels]. slots: [batch].
        """
        taps = self.weight[...].shape[1] - 1
        x = jnp.where((starts[:, None] + jnp.arange(x.shape[1]) >= 0)[..., None], x, 0)
        history = read_ring(ring, slots, starts[:, None] - taps + jnp.arange(taps))
        return self(x, history), write_ring(ring, slots, x, starts, lengths)
