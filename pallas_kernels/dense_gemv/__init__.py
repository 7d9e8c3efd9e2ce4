"""Dense linear layers for up to eight tokens, with the residual add and norm before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_arrays, check_implementation, check_matrices
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
        ValueError: for what `supports` refuses, a residual without a norm, and arguments that do not fit together.
    """
    _check(x, matrices, residual, norm_weight, activation, implementation)
    if implementation == "reference":
        run, options = reference.dense_gemv, {}
    else:
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


def _check(x, matrices, residual, norm_weight, activation, implementation) -> None:
    check_implementation(implementation)
    if residual is not None and norm_weight is None:
        raise ValueError("dense_gemv adds a residual only before a norm; give norm_weight too")
    if activation not in (None, "swiglu"):
        raise ValueError(f"activation is None or 'swiglu', not {activation!r}")
    rows = [matrix.weight.shape[0] for matrix in matrices]
    if not rows or (activation and (len(rows) != 2 or rows[0] != rows[1])):
        wanted = "two matrices of as many rows" if activation else "at least one matrix"
        raise ValueError(f"dense_gemv wants {wanted}, not {len(rows)} of {rows} rows")
    if x.ndim != 2 or not x.shape[0]:
        raise ValueError(f"x is {x.shape}, not [tokens, in] of one token or more")
    columns, bf16 = x.shape[1], (jnp.bfloat16,)
    if implementation == "triton" and (problem := supports(x.shape[0], columns, matrices)):
        raise ValueError(f"dense_gemv has no kernel for {problem}; use implementation='reference'")
    check_arrays(x=(x, x.shape, bf16), residual=(residual, x.shape, bf16), norm_weight=(norm_weight, (columns,), bf16))
    check_matrices(**{f"matrix {i}": (matrix, (rows[i], columns)) for i, matrix in enumerate(matrices)})


def supports(num_tokens: int, num_columns: int, matrices: Sequence[Matrix]) -> str | None:
    """What stands against the kernel, or None."""
    if num_tokens > MAX_TOKENS:
        return f"{num_tokens} tokens (at most {MAX_TOKENS})"
    multiple = 8 if matrices[0].scales is None else 16
    if num_columns % multiple:
        return f"{num_columns} columns (a multiple of {multiple})"
    return None
