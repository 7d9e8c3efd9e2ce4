"""NVFP4: quantising to the nearest representable weights, and GGUF's byte layout of them.

A weight is `e2m1(code) * e4m3(scale byte) * global scale`: 16 weights of a row share a scale byte, a matrix shares the
global scale. The global scale brings the largest block scale to E4M3's largest value, 448; a block scale brings the
block's largest weight near E2M1's largest value, 6.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

BLOCK, SUPER_BLOCK = 16, 64
E2M1_MAX, E4M3_MAX = 6.0, 448.0
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def nearest_e2m1(x: Any, xp: Any = np) -> Any:
    """Index in `E2M1` of the value nearest to |x|; a tie goes to the even index."""
    a = xp.abs(x)
    bounds = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
    return sum((a >= b if up else a > b).astype(xp.uint8) for b, up in bounds)


def scales_of(blocks: Any, xp: Any = np) -> tuple[Any, Any]:
    """Blocks [..., N, K/16, 16] float32 -> E4M3 block scales as float32 [..., N, K/16], and global scales [...]."""
    e4m3 = ml_dtypes.float8_e4m3fn if xp is np else jnp.float8_e4m3fn
    largest = xp.abs(blocks).max(-1)
    unit = xp.maximum(largest.max((-1, -2)), 1e-20) / (E2M1_MAX * E4M3_MAX)
    wanted = xp.clip(largest / E2M1_MAX / unit[..., None, None], 0, E4M3_MAX)
    return wanted.astype(e4m3).astype(xp.float32), unit


def quantize(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[..., N, K] -> codes uint8 [..., N, K] (bit 3 is the sign), scale bytes [..., N, K/16], global scales [...]."""
    blocks = np.asarray(weight, np.float32).reshape(*weight.shape[:-1], -1, BLOCK)
    scales, unit = scales_of(blocks)
    step = (scales * unit[..., None, None])[..., None]
    codes = nearest_e2m1(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
    codes |= (np.signbit(blocks) & (codes > 0)).astype(np.uint8) << 3
    return (
        codes.reshape(weight.shape),
        scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8),
        np.asarray(unit, np.float32),
    )


def dequantize(codes: np.ndarray, scale_bytes: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """The inverse of `quantize`, in float32."""
    values = E2M1[codes & 7] * np.where(codes & 8, -1, 1).astype(np.float32)
    scales = scale_bytes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.asarray(unit)[..., None, None]
    return (values.reshape(*scales.shape, BLOCK) * scales[..., None]).reshape(codes.shape)


def round_trip(weight: jax.Array) -> jax.Array:
    """What a weight [..., N, K] becomes in NVFP4, in JAX; gradients pass through as if nothing was rounded."""
    blocks = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, BLOCK)
    scales, unit = scales_of(blocks, jnp)
    step = (scales * unit[..., None, None])[..., None]
    codes = nearest_e2m1(jnp.where(step > 0, blocks / jnp.where(step > 0, step, 1), 0), jnp)
    rounded = (jnp.asarray(E2M1)[codes] * jnp.sign(blocks) * step).reshape(weight.shape)
    return weight + jax.lax.stop_gradient(rounded.astype(weight.dtype) - weight)


def to_gguf_bytes(codes: np.ndarray, scale_bytes: np.ndarray) -> np.ndarray:
    """Codes [..., K] and scale bytes [..., K/16] to GGUF super-blocks: uint8 [..., K/64 * 36].

    36 bytes hold 64 weights: four scale bytes, then 8 bytes a block, whose low nibbles are the block's first eight
    codes and whose high nibbles are its last eight.
    """
    lead, k = codes.shape[:-1], codes.shape[-1]
    if k % SUPER_BLOCK:
        raise ValueError(f"NVFP4 needs rows of a multiple of {SUPER_BLOCK} weights, not {k}")
    halves = codes.reshape(*lead, k // SUPER_BLOCK, 4, 2, 8)
    nibbles = (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*lead, k // SUPER_BLOCK, 32)
    scales = scale_bytes.reshape(*lead, k // SUPER_BLOCK, 4)
    return np.concatenate([scales, nibbles], -1).reshape(*lead, -1)


def from_gguf_bytes(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `to_gguf_bytes`."""
    blocks = data.reshape(*data.shape[:-1], -1, 36)
    nibbles = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)
    codes = np.stack([nibbles & 15, nibbles >> 4], -2)
    return codes.reshape(*data.shape[:-1], -1), blocks[..., :4].reshape(*data.shape[:-1], -1)
