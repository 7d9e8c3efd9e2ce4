"""The real models' routers, by name."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Columns, and experts to choose from."""

    hidden: int
    num_experts: int


FLINT = Shape(hidden=2048, num_experts=256)
# The embedded checkpoint.
FLINT_TINY = Shape(hidden=128, num_experts=8)
