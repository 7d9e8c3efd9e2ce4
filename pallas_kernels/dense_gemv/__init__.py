"""Dense linear layers for up to eight tokens, with the residual add and norm before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dense_gemv import reference, triton
from pallas_kernels.dense_gemv.triton import Blocks
from pallas_kernels.tuning import block_sizes, case_of
from pallas_kernels.warp_tiles import MAX_TOKENS, Matrix

__all__ = ["Blocks", "Matrix", "dense_gemv", "supports"]


def dense_gemv(
    x: jax.Array,
    matrices: Sequence[Matrix],
    *,
    residual: jax.Array | None = None,
    norm_weight: jax.Array | None = None,
    norm_eps: float = 0.0,
    activation: str | None = None,
    out_dtype: Any = jnp.bfloat16,
    blocks: Blocks | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> list[jax.Array]:
    """`x @ W.T` of one or several matrices, rounded once.

    Args:
        x: bfloat16 [tokens, in].
        matrices: BF16 or NVFP4, all of one format and of `in` columns; their outputs stand side by side.
        residual: bfloat16 [tokens, in], added to x in float32 before the norm.
        norm_weight: bfloat16 [in]. The product is then with the RMSNorm of the unrounded sum.
        activation: "swiglu" takes two matrices, gate and up, each rounded to bfloat16, and gives silu(gate) * up.
        out_dtype: bfloat16 (one rounding) or float32 (none).

    Returns:
        The output [tokens, out], and with a residual also the rounded sum bfloat16 [tokens, in].

    Raises:
        ValueError: for what `supports` refuses, and for a residual without a norm.
    """
    if residual is not None and norm_weight is None:
        raise ValueError("dense_gemv adds a residual only before a norm; give norm_weight too")
    if implementation == "reference":
        run, options = reference.dense_gemv, {}
    else:
        problem = supports(x.shape[0], x.shape[1], matrices)
        if problem:
            raise ValueError(f"dense_gemv has no kernel for {problem}; use implementation='reference'")
        blocks = blocks or default_blocks(x.shape[0], x.shape[1], matrices, activation)
        run, options = triton.dense_gemv, dict(blocks=blocks, interpret=interpret)
    return list(
        run(
            x,
            residual,
            norm_weight,
            matrices,
            activation=activation,
            norm_eps=norm_eps,
            out_dtype=out_dtype,
            **options,
        )
    )


def default_blocks(
    num_tokens: int, num_columns: int, matrices: Sequence[Matrix], activation: str | None = None
) -> Blocks:
    """The tuned block sizes, or else a rule that did well on an H200."""
    op = "dense_gemv_swiglu" if activation == "swiglu" else "dense_gemv"
    if sizes := block_sizes(op, case_of(matrices, num_tokens)):
        return Blocks(**sizes)
    rows, bf16 = sum(matrix.weight.shape[0] for matrix in matrices), matrices[0].scales is None
    if rows > 65536:
        return Blocks(2, 8) if bf16 else Blocks(4, 8) if num_tokens == 1 else Blocks(2, 4)
    if num_columns > 2048:
        return Blocks(1, 16) if bf16 or num_tokens == 1 else Blocks(2, 8)
    if num_tokens == 1:
        return Blocks(2, 8)
    # Several tokens' norms are dear: fewer programs that do them, as far as registers go.
    if activation == "swiglu":
        return Blocks(1, 16) if bf16 else Blocks(2, 8)
    return Blocks(2, 16) if bf16 else Blocks(5, 8)


def supports(num_tokens: int, num_columns: int, matrices: Sequence[Matrix]) -> str | None:
    """What stands against the kernel, or None."""
    if num_tokens > MAX_TOKENS:
        return f"{num_tokens} tokens (at most {MAX_TOKENS})"
    multiple = 8 if matrices[0].scales is None else 16
    if num_columns % multiple:
        return f"{num_columns} columns (a multiple of {multiple})"
    return None
