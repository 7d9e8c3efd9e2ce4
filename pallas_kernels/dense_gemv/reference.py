"""What `dense_gemv` computes, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.warp_tiles import Matrix


def dense_gemv(x, residual, norm_weight, matrices, *, activation, norm_eps, out_dtype):
    """See `pallas_kernels.dense_gemv.dense_gemv`."""
    stream = None
    if norm_weight is not None:
        x, stream = add_norm(x, residual, norm_weight, norm_eps)
    products = [accumulate(x, matrix) for matrix in matrices]
    if activation == "swiglu":
        gate, up = (rounded(product, jnp.bfloat16).astype(jnp.float32) for product in products)
        out = rounded(jax.nn.silu(gate) * up, out_dtype)
    else:
        out = rounded(jnp.concatenate(products, axis=-1), out_dtype)
    return [out] if stream is None else [out, stream]


def add_norm(x, residual, norm_weight, eps):
    """The norm of the float32 sum, and the new stream (None without a residual): spec 4.3 and 4.4."""
    total = x.astype(jnp.float32)
    if residual is not None:
        total = total + residual.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(total * total, axis=-1, keepdims=True) + eps)
    normed = rounded(total * scale * norm_weight.astype(jnp.float32), x.dtype)
    return normed, None if residual is None else rounded(total, x.dtype)


def rounded(x, dtype):
    """Rounds once; a plain cast may be dropped where a compiler keeps excess precision."""
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def accumulate(x, matrix: Matrix, expert=None):
    """The unrounded product with one matrix (or the stack's `expert`), float32: spec 4.1."""
    pick = (lambda leaf: leaf) if expert is None else (lambda leaf: leaf[expert])
    if matrix.scales is None:
        return _dot(x, pick(matrix.weight).astype(jnp.float32))
    weight = dequantized(pick(matrix.weight), pick(matrix.scales))
    return _dot(x, weight) * pick(matrix.global_scale)


def _dot(x, weight):
    return jnp.einsum("tk,nk->tn", x.astype(jnp.float32), weight, precision=lax.Precision.HIGHEST)


def dequantized(codes, scales):
    """codes uint16 [..., K / 4], scale bytes [..., K / 16] -> float32 [..., K], without the global scale."""
    values = lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).astype(jnp.float32)  # [..., K / 4, 4], low bits first
    blocks = values.reshape(*scales.shape, 16)
    scale = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.float32)
    return (blocks * scale[..., None]).reshape(*codes.shape[:-1], -1)
