"""Checks of what an op is given: a kernel reads past an array that is too short, and nobody would know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.warp_tiles import Matrix

IMPLEMENTATIONS = ("triton", "reference")


def check_implementation(implementation: str) -> None:
    """Raises ValueError unless it is one of `IMPLEMENTATIONS`."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {' or '.join(map(repr, IMPLEMENTATIONS))}, not {implementation!r}")


def check_arrays(**arrays: tuple[Any, tuple[int, ...], Sequence[Any]]) -> None:
    """Each array by name with the shape and the dtypes that it may have; None instead of an array is none.

    Raises:
        ValueError: the message names the array, and what goes with the others.
    """
    for name, (x, shape, dtypes) in arrays.items():
        if x is None:
            continue
        if x.shape != shape:
            raise ValueError(f"{name} is {x.shape}; {shape} goes with the other arguments")
        if x.dtype not in dtypes:
            raise ValueError(f"{name} is {x.dtype}, not {' or '.join(jnp.dtype(dtype).name for dtype in dtypes)}")


def check_matrices(**matrices: tuple[Matrix, tuple[int, ...]]) -> None:
    """Each matrix by name with its shape [*experts, out, in]; all of one format.

    Raises:
        ValueError: the message names the matrix and what is wrong with it.
    """
    formats = {matrix.weight_format for matrix, _ in matrices.values()}
    if len(formats) > 1:
        raise ValueError(f"the matrices are of several formats: {', '.join(sorted(formats))}")
    for name, (matrix, (*lead, columns)) in matrices.items():
        if matrix.weight_format == "bf16":
            check_arrays(**{name: (matrix.weight, (*lead, columns), (jnp.bfloat16,))})
            continue
        if columns % 16:
            raise ValueError(f"{name} has {columns} columns; in NVFP4 a multiple of 16 is needed")
        check_arrays(
            **{
                f"{name}'s codes": (matrix.weight, (*lead, columns // 4), (jnp.uint16,)),
                f"{name}'s scales": (matrix.scales, (*lead, columns // 16), (jnp.uint8,)),
                f"{name}'s global scale": (matrix.global_scale, tuple(lead[:-1]), (jnp.float32,)),
            }
        )
