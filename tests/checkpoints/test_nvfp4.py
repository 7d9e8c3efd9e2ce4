"""The NVFP4 quantiser: layout to the bit, and the nearest value that the format can hold."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints.training import nvfp4

# One super-block with each scale and code order told apart: see the values below.
BLOCK = bytes.fromhex("3840307E1032547698BADCFE0123456789ABCDEF" + "77" * 8 + "F7" * 8)
VALUES = [
    *(0, 1, 2, 4, 0, -1, -2, -4, 0.5, 1.5, 3, 6, -0.5, -1.5, -3, -6),
    *(1, 3, 6, 12, -1, -3, -6, -12, 0, 2, 4, 8, 0, -2, -4, -8),
    *[3] * 16,
    *[2688] * 8,
    *[-2688] * 8,
]


def test_known_block():
    data = np.frombuffer(BLOCK, np.uint8)[None]
    codes, scales = nvfp4.from_gguf_bytes(data)
    np.testing.assert_array_equal(nvfp4.dequantize(codes, scales, np.float32(1))[0], np.array(VALUES, np.float32))
    np.testing.assert_array_equal(nvfp4.to_gguf_bytes(codes, scales), data)


def test_known_block_survives_quantising():
    """The values' own scales are representable, so nothing is lost (the largest weight is 6 x 448)."""
    codes, scales, unit = nvfp4.quantize(np.array([VALUES], np.float32))
    assert unit == 1
    np.testing.assert_array_equal(nvfp4.dequantize(codes, scales, unit)[0], np.array(VALUES, np.float32))


def test_codes_are_nearest():
    """Brute force over all codes; no ties in random data, and ties go to the even code."""
    weight = np.random.default_rng(0).normal(size=(3, 8, 128)).astype(np.float32)
    codes, scales, unit = nvfp4.quantize(weight)
    step = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * unit[:, None, None]
    all_values = np.concatenate([nvfp4.E2M1, -nvfp4.E2M1]) * step[..., None, None]  # [3, 8, 8, 1, 16]
    best = np.abs(weight.reshape(3, 8, 8, 16, 1) - all_values).min(-1)
    error = np.abs(nvfp4.dequantize(codes, scales, unit) - weight).reshape(best.shape)
    np.testing.assert_allclose(error, best, rtol=1e-5, atol=1e-7)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    np.testing.assert_array_equal(nvfp4.nearest_e2m1(ties), [0, 2, 2, 4, 4, 6, 6])


def test_scale_bytes_are_nearest_e4m3():
    """Against every byte; covers the values where common helpers go wrong: near 448 and among subnormals."""
    bytes_ = np.arange(0x7F, dtype=np.uint8)
    table = bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    wanted = np.concatenate([np.random.default_rng(1).uniform(0, 448, 500), [448, 440, 300, 7.7 / 512, 0.4 / 512]])
    blocks = np.zeros((1, len(wanted) + 1, 16), np.float32)
    blocks[0, :-1, 0], blocks[0, -1, 0] = wanted * 6, 448 * 6  # the last block makes the global scale 1
    scales, unit = nvfp4.scales_of(blocks)
    assert unit == 1
    nearest = np.abs(table[None] - wanted[:, None]).min(1)
    np.testing.assert_allclose(np.abs(scales[0, :-1] - wanted), nearest, rtol=1e-4, atol=1e-6)


def test_every_tensor_and_expert_has_its_own_scale():
    weight = np.random.default_rng(2).normal(size=(4, 8, 64)).astype(np.float32) * np.array([1, 2, 3, 4])[:, None, None]
    _, _, unit = nvfp4.quantize(weight)
    assert unit.shape == (4,)
    assert len(set(unit.tolist())) == 4
    assert nvfp4.quantize(weight[0])[2].shape == ()


def test_zeros():
    codes, scales, unit = nvfp4.quantize(np.zeros((4, 64), np.float32))
    assert unit > 0
    assert not nvfp4.dequantize(codes, scales, unit).any()


def test_training_sees_what_is_stored():
    weight = np.random.default_rng(3).normal(size=(3, 8, 64)).astype(np.float32)
    stored = nvfp4.dequantize(*nvfp4.quantize(weight))
    np.testing.assert_allclose(np.asarray(nvfp4.round_trip(jnp.asarray(weight))), stored, rtol=1e-6, atol=1e-9)
    gradient = jax.grad(lambda w: (nvfp4.round_trip(w) * 3).sum())(jnp.asarray(weight))
    np.testing.assert_array_equal(gradient, 3)


def test_rows_must_fill_super_blocks():
    with pytest.raises(ValueError, match="multiple of 64"):
        nvfp4.to_gguf_bytes(np.zeros((1, 48), np.uint8), np.zeros((1, 3), np.uint8))
