"""What the cache must know of one layer."""

from __future__ import annotations

from typing import NamedTuple


class LayerShape(NamedTuple):
    """What one layer keeps of the tokens it has seen.

    Attributes:
        sliding: whether it sees a window only, so that older pages are not needed.
        conv_channels: channels of its four short convolutions (keys, values, attention output, MLP output); empty for
            a layer without them.
    """

    sliding: bool
    num_kv_heads: int
    head_dim: int
    conv_channels: tuple[int, ...] = ()
