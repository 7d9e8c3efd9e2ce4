"""Rotary position embedding, half-split (NeoX) layout: dimension d pairs with d + head_dim / 2."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from modeling.layers.numerics import rounded


def inverse_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """`theta ** (-2d / head_dim)`, [head_dim / 2] float32, rounded after each step as PyTorch does.

    The exact values differ from these by one step in a third of the entries, which turns into 0.016 rad at position
    262,143. The power itself is taken in float64: it is the one step that float32 libraries round differently.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1) / powers


def rope_angles(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each [*positions.shape, head_dim / 2] float32, of `position * inv_freq`.

    The angle is the float32 product the reference forms. A float64 angle would be more exact and would disagree with
    it by up to 0.014 rad at position 262,143.
    """
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(head_dim, theta)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates `x` [..., num_heads, head_dim] by angles [..., head_dim / 2]; float32 inside, rounded once."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return rounded(jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1), x.dtype)
