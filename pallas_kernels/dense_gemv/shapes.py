"""The real models' dense linear layers, by name."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Columns, the rows of each matrix, and what stands around the product.

    Attributes:
        norm: whether the residual add and the norm come before.
        swiglu: whether the two matrices are gate and up.
        float32: whether the output is not rounded.
    """

    columns: int
    rows: tuple[int, ...]
    norm: bool = False
    swiglu: bool = False
    float32: bool = False


FLINT_QKV = Shape(2048, (4096, 512, 512), norm=True)
FLINT_O = Shape(4096, (2048,))
FLINT_GATE_UP = Shape(2048, (6144, 6144), norm=True, swiglu=True)  # of the dense layers
FLINT_DOWN = Shape(6144, (2048,))
FLINT_HEAD = Shape(2048, (150_144,), float32=True)
# The embedded checkpoint.
FLINT_TINY_QKV = Shape(128, (256, 64, 64), norm=True)
FLINT_TINY_O = Shape(256, (128,))
FLINT_TINY_GATE_UP = Shape(128, (256, 256), norm=True, swiglu=True)
FLINT_TINY_DOWN = Shape(256, (128,))
FLINT_TINY_HEAD = Shape(128, (1024,), float32=True)
