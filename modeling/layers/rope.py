"""Rotary position embedding, half-split (NeoX) layout: dimension d pairs with d + head_dim / 2."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from modeling.layers.numerics import rounded


def rope_angles(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each [*positions.shape, head_dim / 2] float32, of `position * inv_freq`.

    The angle is the float32 product the reference forms. A float64 angle would be more exact and would disagree with
    it by up to 0.014 rad at position 262,143.
    """
    inv_freq = (1.0 / np.float64(theta) ** (np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    angles = positions[..., None].astype(jnp.float32) * inv_freq
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates `x` [..., num_heads, head_dim] by angles [..., head_dim / 2]; float32 inside, rounded once."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return rounded(jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1), x.dtype)
