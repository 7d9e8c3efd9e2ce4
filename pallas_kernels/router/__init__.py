"""The add and norm before an MoE block, and its router's logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_arrays, check_implementation
from pallas_kernels.router import reference, triton
from pallas_kernels.router.triton import Blocks
from pallas_kernels.tuning import block_sizes, case_of
from pallas_kernels.warp_tiles import MAX_TOKENS, Matrix

__all__ = ["Blocks", "router"]


def router(
    x: jax.Array,
    residual: jax.Array,
    norm_weight: jax.Array,
    gate: jax.Array,
    *,
    norm_eps: float,
    round_logits: bool,
    blocks: Blocks | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> list[jax.Array]:
    """Adds a sublayer's output to the residual stream, normalises, and takes the router's logits.

    Args:
        x, residual: bfloat16 [tokens, hidden].
        norm_weight: bfloat16 [hidden].
        gate: float32 or bfloat16 [num_experts, hidden].
        round_logits: whether logits are rounded to bfloat16, the rule of a bfloat16 router (spec 4.8).

    Returns:
        Logits float32 [tokens, num_experts], the normalised sum and the new stream, both bfloat16 [tokens, hidden].

    Raises:
        ValueError: arguments that do not fit together, or more than eight tokens.
    """
    check_implementation(implementation)
    (tokens, hidden), bf16 = x.shape, (jnp.bfloat16,)
    check_arrays(
        x=(x, (tokens, hidden), bf16),
        residual=(residual, (tokens, hidden), bf16),
        norm_weight=(norm_weight, (hidden,), bf16),
        gate=(gate, (gate.shape[0], hidden), (jnp.float32, jnp.bfloat16)),
    )
    if implementation == "triton" and tokens > MAX_TOKENS:
        raise ValueError(f"the kernel takes {MAX_TOKENS} tokens at most, not {tokens}")
    options = dict(norm_eps=norm_eps, round_logits=round_logits)
    if implementation == "reference":
        return reference.router(x, residual, norm_weight, gate, **options)
    blocks = blocks or Blocks(**block_sizes("router", case_of([Matrix(gate)], x.shape[0])) or {})
    return list(triton.router(x, residual, norm_weight, gate, **options, blocks=blocks, interpret=interpret))
