"""The real models' MoE blocks, by name."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Widths of the stream, of an expert and of the shared expert; experts, and how many a token selects."""

    hidden: int
    inner: int
    shared_inner: int
    num_experts: int
    top_k: int


FLINT = Shape(hidden=2048, inner=512, shared_inner=1024, num_experts=256, top_k=6)
# The embedded checkpoint.
FLINT_TINY = Shape(hidden=128, inner=64, shared_inner=64, num_experts=8, top_k=2)
