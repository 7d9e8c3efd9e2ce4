"""The repack of NVFP4 super-blocks, to the bit."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_writer import gguf_tensors, tiny_config, write_gguf_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_model import sparse_mlp

import modeling
from modeling.layers.linear import dequantize_nvfp4
from modeling.loading import read
from modeling.loading.nvfp4 import repack

BLOCK = bytes.fromhex("3840307E1032547698BADCFE0123456789ABCDEF" + "77" * 8 + "F7" * 8)
CODES = bytes.fromhex("2064A8EC3175B9FD3175B9FD2064A8EC" + "77" * 12 + "FF" * 4)
VALUES = [
    *(0, 1, 2, 4, -0.0, -1, -2, -4, 0.5, 1.5, 3, 6, -0.5, -1.5, -3, -6),
    *(1, 3, 6, 12, -1, -3, -6, -12, 0, 2, 4, 8, -0.0, -2, -4, -8),
    *[3] * 16,
    *([2688] * 8 + [-2688] * 8),
]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def repacked(blocks: bytes) -> tuple[np.ndarray, np.ndarray, bool]:
    """Into buffers that hold rubbish beforehand."""
    raw = np.frombuffer(blocks, np.uint8)
    codes = np.full(len(raw) // 36 * 16, 0xA5A5, np.uint16)
    scales = np.full(len(raw) // 36 * 4, 0xA5, np.uint8)
    unusable = repack(raw, codes, scales)
    return codes, scales, unusable


def defined_value(block: bytes, column: int) -> float:
    """One weight by the format's definition, one nibble at a time."""
    sub, j = column // 16, column % 16
    byte = block[4 + 8 * sub + j % 8]
    x = block[sub] & 0x7F
    exponent, mantissa = x >> 3, x & 7
    scale = mantissa / 512 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return E2M1[byte & 15 if j < 8 else byte >> 4] * (0.0 if x == 0x7F else scale)


def test_published_vector():
    codes, scales, unusable = repacked(BLOCK)
    assert codes.tobytes() == CODES
    assert scales.tobytes() == BLOCK[:4]
    assert not unusable


def test_published_vector_dequantised():
    codes, scales, _ = repacked(BLOCK)
    values = np.asarray(dequantize_nvfp4(jnp.asarray(codes), jnp.asarray(scales), jnp.dtype(jnp.bfloat16))).astype(
        np.float32
    )
    assert values.tobytes() == np.array(VALUES, np.float32).tobytes()  # bytes, so that -0 is told from 0


def test_every_scale_byte():
    _, scales, unusable = repacked(b"".join(bytes([byte]) * 4 + bytes(32) for byte in range(255)))
    expected = [0 if byte & 0x7F == 0x7F else byte & 0x7F for byte in range(255)]
    assert scales.reshape(-1, 4).tolist() == [[byte] * 4 for byte in expected]
    assert not unusable


@pytest.mark.parametrize("place", range(4))
def test_scale_byte_ff_is_reported_wherever_it_is(place):
    blocks = bytearray(BLOCK * 5)
    blocks[36 * 3 + place] = 0xFF
    assert repacked(bytes(blocks))[2]


@given(st.binary(min_size=36, max_size=36).filter(lambda block: 0xFF not in block[:4]))
@settings(max_examples=60, deadline=None)
def test_any_block_keeps_its_values(block):
    codes, scales, unusable = repacked(block)
    values = codes.reshape(-1, 1) >> np.array([0, 4, 8, 12], np.uint16) & 15
    unpacked = np.array(E2M1, np.float32)[values.reshape(-1)] * np.repeat(
        scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32), 16
    )
    assert unpacked.tobytes() == np.array([defined_value(block, k) for k in range(64)], np.float32).tobytes()
    assert not unusable


def test_agrees_with_the_gguf_library():
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    blocks = np.random.default_rng(0).integers(0, 255, (50, 36), dtype=np.uint8)  # 255, no scale byte, is left out
    codes, scales, _ = repacked(blocks.tobytes())
    ours = np.asarray(dequantize_nvfp4(jnp.asarray(codes), jnp.asarray(scales), jnp.dtype(jnp.float32)))
    assert np.array_equal(ours, dequantize(blocks, GGMLQuantizationType.NVFP4).reshape(-1))


def test_rows_and_experts_keep_their_places(tmp_path, monkeypatch):
    """Chunks much smaller than a tensor, that end inside rows and experts."""
    monkeypatch.setattr(read, "CHUNK", 36 * 5)
    config = tiny_config()
    tensors = gguf_tensors(config)
    model = modeling.load(write_gguf_folder(tmp_path, config, tensors), progress=False)
    down = sparse_mlp(model).experts.down_proj
    raw = np.frombuffer(tensors["blk.2.ffn_down_exps.weight"].data, np.uint8).reshape(4, 64, 2, 36)
    for expert, row, block in [(0, 0, 0), (0, 0, 1), (1, 63, 1), (3, 17, 0)]:
        codes, scales, _ = repacked(raw[expert, row, block].tobytes())
        assert np.array_equal(down.codes[...][expert, row, 16 * block : 16 * (block + 1)], codes)
        assert np.array_equal(down.scales[...][expert, row, 4 * block : 4 * (block + 1)], scales)
