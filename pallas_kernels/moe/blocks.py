"""Block sizes of the MoE kernels."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Tunable sizes: row groups (of 8) a program of `gate_up`, and its warps; the same of `down`, whose warps follow
    from the experts' columns if there are several tokens."""

    row_groups: int = 2
    num_warps: int = 8
    down_row_groups: int = 2
    down_warps: int = 16
