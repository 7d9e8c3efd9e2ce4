"""Pictures and sound as vectors of the text stream: the hMLP patch tower and the dMel embedding (spec section 7).

Both work on one row (a patch, a 50 ms frame) at a time, so that any number of rows may be cut into batches anywhere.
Unlike in the trunk, norms round twice: the normalised value, then its product with the weight.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from modeling.errors import CheckpointError
from modeling.inkling.config import AudioConfig, VisionConfig
from modeling.layers.embedding import Embedding
from modeling.layers.linear import Linear
from modeling.layers.norm import RMSNorm
from modeling.layers.numerics import rounded


class TowerNorm(RMSNorm):
    """RMSNorm that rounds the normalised value before the weight multiplies it."""

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        normalised = rounded(x32 * scale, x.dtype).astype(jnp.float32)
        return rounded(normalised * self.weight[...].astype(jnp.float32), x.dtype)


class VisionTower(nnx.Module):
    """Patches folded into one vector each, by linear layers with norm and GELU between them.

    Args:
        linears: (out, in) features of each linear layer; the checkpoint decides, see `folds_of`.

    Attributes:
        row: the shape of one patch.
    """

    def __init__(self, config: VisionConfig, linears: tuple[tuple[int, int], ...], eps: float):
        self.folds = folds_of(config, linears)
        self.row = (config.temporal_patch_size, config.patch_size, config.patch_size, config.num_channels)
        self.linears = nnx.List(Linear(out, width, "bf16") for out, width in linears)
        self.norms = nnx.List(TowerNorm(out, eps) for out, _ in linears[:-1])
        self.final_norm = TowerNorm(linears[-1][0], eps)

    def __call__(self, patches: jax.Array) -> jax.Array:
        """patches [rows, time, height, width, channels] -> [rows, hidden_size] in the patches' dtype."""
        x = patches
        for i, (time, space) in enumerate(self.folds):
            x = self.linears[i](fold(x, time, space))
            if i < len(self.norms):
                x = rounded(jax.nn.gelu(self.norms[i](x).astype(jnp.float32), approximate=False), x.dtype)
        return self.final_norm(x.reshape(x.shape[0], -1))


def published_linears(hidden_size: int) -> tuple[tuple[int, int], ...]:
    """The published tower's layers, for patches of 2 x 40 x 40 pixels."""
    return ((128, 75), (320, 512), (4800, 5120), (hidden_size, 9600))


def folds_of(config: VisionConfig, linears: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """How far each layer folds time and space (height and width alike), from the layers' sizes.

    The number of positions that a layer takes together is its input width over the channels before it: a square in
    space, and what is left in time at the last layer.

    Raises:
        CheckpointError: the layers do not fold a patch into one vector.
    """
    channels, size, folds = config.num_channels, config.patch_size, []
    for i, (out, width) in enumerate(linears):
        time = config.temporal_patch_size if i == len(linears) - 1 else 1
        space = math.isqrt(width // (channels * time)) if channels else 0
        if space < 1 or channels * time * space * space != width or size % space:
            raise CheckpointError(
                f"vision tower layer {i} takes {width} features, which is no square block of the {size} x {size} "
                f"positions of {channels} channels before it"
            )
        folds.append((time, space))
        channels, size = out, size // space
    if size != 1:
        raise CheckpointError(f"the vision tower leaves {size} x {size} positions of a patch instead of one")
    return tuple(folds)


def fold(x: jax.Array, time: int, space: int) -> jax.Array:
    """Moves blocks of `time` x `space` x `space` positions into the channel axis, the block's position slowest."""
    rows, t, h, w, c = x.shape
    x = x.reshape(rows, t // time, time, h // space, space, w // space, space, c)
    x = x.transpose(0, 1, 3, 5, 2, 4, 6, 7)
    return x.reshape(rows, t // time, h // space, w // space, time * space * space * c)


class AudioTower(nnx.Module):
    """The sum of one embedding a mel band, chosen by the band's bin, normalised. `row` is the shape of one frame."""

    def __init__(self, config: AudioConfig, hidden_size: int, eps: float):
        self.encoder = Embedding(config.num_mel_bins * config.mel_vocab_size, hidden_size)
        self.final_norm = TowerNorm(hidden_size, eps)
        self.mel_vocab_size = config.mel_vocab_size
        self.row = (config.num_mel_bins,)

    def __call__(self, bins: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """bins [rows, mel_bins] of 0 .. mel_vocab_size - 1 -> [rows, hidden_size] in `dtype`."""
        ids = jnp.arange(bins.shape[1]) * self.mel_vocab_size + bins.astype(jnp.int32)
        total = self.encoder(ids, jnp.dtype(jnp.float32)).sum(axis=1)
        return self.final_norm(rounded(total, dtype))
