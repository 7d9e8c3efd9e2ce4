"""Where values are rounded. An activation's dtype is the compute dtype of the layer that reads it.

In bfloat16 every `rounded` below is one of the reference's rounding points; in float32 it changes nothing, which
makes the float32 model the unrounded truth that implementations are compared with.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds float32 `x` once, to nearest-even, to `dtype` (bfloat16 or float32).

    A plain cast may be dropped by a compiler that keeps excess precision inside a fusion; `reduce_precision` may not.
    """
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def dot32(subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """`einsum` accumulated in float32. `w` is widened to float32 where `x` is, else both are bfloat16.

    Full precision is asked for explicitly: GPUs otherwise multiply float32 in TF32.
    """
    return jnp.einsum(
        subscripts, x, w.astype(x.dtype), preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
    )
