"""Linear layers on bfloat16 and on packed NVFP4 weights (W4A16: activations are never quantised)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from modeling.errors import CheckpointError
from modeling.layers.numerics import dot32, rounded

NVFP4_BLOCK = 16  # consecutive weights of a row that share one E4M3 scale
NVFP4_WORD = 4  # codes of a row that share one word


class Linear(nnx.Module):
    """`y = x @ W.T` without bias, for one matrix or for a stack of experts.

    Two storage formats, chosen by the checkpoint:

    * "bf16": `weight` [*experts, out, in].
    * "nvfp4": `codes` uint16 [*experts, out, in / 4], four E2M1 values a word, column 4c + j of a row in bits
      4j..4j+3 of its word c; `scales` uint8 [*experts, out, in / 16], the bytes of E4M3 block scales; `global_scale`
      float32 [*experts]. A weight is `e2m1 * e4m3 * global_scale`. The product of the first two is exact in bfloat16;
      the global scale multiplies the float32 accumulator instead of the weight, so that nothing is rounded on the way.

    On a little-endian host the words are the bytes of a safetensors checkpoint, the even column in the low nibble. They
    are words since the decode kernels take four codes at a time, and an array on a device cannot be reinterpreted with
    another element size without a copy.
    """

    def __init__(self, out_features: int, in_features: int, weight_format: str, num_experts: int | None = None):
        """Raises: CheckpointError: NVFP4 cannot pack rows of `in_features` weights."""
        lead = () if num_experts is None else (num_experts,)
        if weight_format == "bf16":
            self.weight = nnx.Param(jnp.zeros((*lead, out_features, in_features), jnp.bfloat16))
        elif weight_format == "nvfp4":
            if in_features % NVFP4_BLOCK:
                raise CheckpointError(f"NVFP4 needs matrices of a multiple of {NVFP4_BLOCK} columns, not {in_features}")
            self.codes = nnx.Param(jnp.zeros((*lead, out_features, in_features // NVFP4_WORD), jnp.uint16))
            self.scales = nnx.Param(jnp.zeros((*lead, out_features, in_features // NVFP4_BLOCK), jnp.uint8))
            self.global_scale = nnx.Param(jnp.zeros(lead, jnp.float32))
        else:
            raise ValueError(f"weight_format must be 'bf16' or 'nvfp4', not {weight_format!r}")
        self.weight_format = weight_format

    def matrix(self, dtype: jnp.dtype, expert: jax.Array | None = None) -> jax.Array:
        """The weights without the global scale, exact in `dtype`: [..., out, in] (a stack is indexed by `expert`)."""
        pick = (lambda leaf: leaf[...]) if expert is None else (lambda leaf: leaf[...][expert])
        if self.weight_format == "bf16":
            return pick(self.weight).astype(dtype)
        return dequantize_nvfp4(pick(self.codes), pick(self.scales), dtype)

    def scale(self, expert: jax.Array | None = None) -> jax.Array | float:
        """What multiplies the accumulator: the global scale, or 1."""
        if self.weight_format == "bf16":
            return 1.0
        return self.global_scale[...] if expert is None else self.global_scale[...][expert]

    def accumulate(self, x: jax.Array, expert: jax.Array | None = None) -> jax.Array:
        """The unrounded product, float32: x [..., in] -> [..., out], of one matrix or of the stack's `expert` []."""
        return dot32("...k,nk->...n", x, self.matrix(x.dtype, expert)) * self.scale(expert)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out], rounded once to x's dtype."""
        return rounded(self.accumulate(x), x.dtype)


def dequantize_nvfp4(codes: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Codes [..., K / 4] and scale bytes [..., K / 16] to `e2m1 * e4m3` [..., K], exact in bfloat16 and float32."""
    values = lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).astype(dtype)  # [..., K / 4, 4], lowest bits first
    blocks = values.reshape(*scales.shape, NVFP4_BLOCK)
    block_scales = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(dtype)
    return (blocks * block_scales[..., None]).reshape(*codes.shape[:-1], -1)
