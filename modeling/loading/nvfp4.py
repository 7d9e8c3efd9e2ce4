"""From GGUF's NVFP4 super-blocks to the layout `modeling.layers.linear.Linear` holds. Lossless.

A super-block packs 64 weights of a row in 36 bytes: 4 scale bytes, then 4 sub-blocks of 8 code bytes. Byte j of a
sub-block holds column j in its low nibble and column j + 8 in its high nibble; `Linear` wants neighbouring columns.
"""

from __future__ import annotations

import numpy as np

BLOCK_WEIGHTS, BLOCK_BYTES = 64, 36

# Blocks repacked at a time: 128 KiB, so that the temporaries stay in a core's cache (1.6 times as fast as 1 MiB).
_SLICE = (1 << 17) // BLOCK_BYTES

_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)
# Halves the distance between the kept pieces: 8 nibbles in 8 bytes become 8 nibbles in 4 bytes.
_SQUEEZE = [
    (np.uint64(4), np.uint64(0x00FF00FF00FF00FF)),
    (np.uint64(8), np.uint64(0x0000FFFF0000FFFF)),
    (np.uint64(16), np.uint64(0x00000000FFFFFFFF)),
]


def repack(blocks: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> bool:
    """Repacks whole super-blocks.

    Args:
        blocks: uint8 [n * 36], as on disk.
        codes: uint16 [n * 16], written: four columns a word, the first in the lowest bits.
        scales: uint8 [n * 4], written: E4M3 bytes with bit 7 cleared and 0x7F (zero in GGUF, NaN in E4M3) as 0.

    Returns:
        Whether a scale byte was 0xFF, which stands for 480 and has no E4M3 equivalent: the result is then unusable.
    """
    unusable = False
    for first in range(0, len(blocks) // BLOCK_BYTES, _SLICE):
        last = first + _SLICE
        words = blocks[36 * first : 36 * last].view("<u4").reshape(-1, BLOCK_BYTES // 4)
        unusable |= _repack_scales(words[:, 0], scales[4 * first : 4 * last])
        _repack_codes(words[:, 1:], codes[16 * first : 16 * last])
    return unusable


def _repack_scales(words: np.ndarray, scales: np.ndarray) -> bool:
    scales.view("<u4")[:] = words
    unusable = bool((scales == 0xFF).any())
    scales &= 0x7F
    scales[scales == 0x7F] = 0
    return unusable


def _repack_codes(words: np.ndarray, codes: np.ndarray) -> None:
    # A sub-block's 8 code bytes are one 64-bit word, which makes this a dozen operations on whole arrays.
    pairs = np.ascontiguousarray(words).view("<u8").reshape(-1)
    high = _squeezed((pairs >> np.uint64(4)) & _LOW)
    np.bitwise_or(_squeezed(pairs & _LOW), high << np.uint64(32), out=codes.view("<u8"))


def _squeezed(nibbles: np.ndarray) -> np.ndarray:
    for shift, mask in _SQUEEZE:
        nibbles |= nibbles >> shift
        nibbles &= mask
    return nibbles
