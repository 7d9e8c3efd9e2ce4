"""What `router` computes, in plain jnp."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.dense_gemv.reference import add_norm, rounded


def router(x, residual, norm_weight, gate, *, norm_eps, round_logits):
    """See `pallas_kernels.router.router`."""
    normed, stream = add_norm(x, residual, norm_weight, norm_eps)
    logits = jnp.einsum(
        "tk,ek->te", normed.astype(jnp.float32), gate.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    if round_logits:
        logits = rounded(logits, jnp.bfloat16).astype(jnp.float32)
    return [logits, normed, stream]
