"""The real models' decode attention, by name."""

from __future__ import annotations

import dataclasses

from pallas_kernels.decode_attention.schedule import PAGE_SIZE


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer's heads, and whether they are rotated and how far they see (None: everything)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    rotary: bool

    def entries(self, context: int, chunk: int = 512) -> int:
        """Pages in a row's table: all of them, or the ring of a window and a prefill chunk."""
        tokens = context if self.window is None else min(context, self.window - 1 + chunk + PAGE_SIZE)
        return -(-tokens // PAGE_SIZE)


FLINT_FULL = Shape(num_heads=32, num_kv_heads=4, head_dim=128, window=None, rotary=False)
FLINT_SLIDING = Shape(num_heads=32, num_kv_heads=4, head_dim=128, window=513, rotary=True)
# The embedded checkpoint.
FLINT_TINY_FULL = Shape(num_heads=8, num_kv_heads=2, head_dim=32, window=None, rotary=False)
FLINT_TINY_SLIDING = Shape(num_heads=8, num_kv_heads=2, head_dim=32, window=33, rotary=True)
