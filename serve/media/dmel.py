"""Sound as Inkling reads it: 50 ms frames, mel bands, each band's magnitude in steps of its logarithm (spec 7.3)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import numpy as np

SAMPLE_RATE = 16_000
HOP = 800  # samples a frame: 50 ms
WINDOW = 1600
BLOCK_FRAMES = 256  # computed at once: 13 s of sound, 4 MB
_FLOOR = 1e-10
_BREAK_HZ, _BREAK_MEL = 1000.0, 15.0  # Slaney's scale is linear below, logarithmic above
_MEL_PER_LOG = 27 / np.log(6.4)


def num_frames(samples: int) -> int:
    """Frames, and so tokens, of this many samples at 16 kHz."""
    return -(-samples // HOP)


def dmel(
    pieces: Iterable[np.ndarray],
    *,
    mel_bins: int = 80,
    levels: int = 16,
    low: float = -7.0,
    high: float = 2.0,
) -> np.ndarray:
    """Quantised mel spectrogram of a sound that arrives in pieces.

    Frame i sees samples 800(i - 1) to 800(i + 1), zeros where there are none. The result depends on the samples alone,
    not on how they are cut: frames are computed in blocks of fixed size. Arithmetic is float64, so that no finite
    float32 overflows and silence is exactly silent.

    Args:
        pieces: mono float32 samples at 16 kHz, each [any number].
        mel_bins: bands between 0 and 8000 Hz.
        levels: steps of log10 of the magnitude, from `low` to `high`, at most 256; ties go to the lower.

    Returns:
        [frames, mel_bins] uint8.
    """
    centres = np.linspace(low, high, levels).astype(np.float32)
    blocks = [quantise(log_mel(block, mel_bins), centres) for block in _blocks(pieces)]
    return np.concatenate(blocks) if blocks else np.zeros((0, mel_bins), np.uint8)


def log_mel(samples: np.ndarray, mel_bins: int = 80) -> np.ndarray:
    """log10 of the mel magnitudes.

    Args:
        samples: [(frames + 1) * 800] float64; the first 800 come before the first frame.

    Returns:
        [frames, mel_bins] float32.
    """
    windows = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP]
    spectrum = np.fft.rfft(windows * _hann())
    magnitude = np.sqrt(np.maximum(spectrum.real**2 + spectrum.imag**2, _FLOOR))
    return np.log10(np.maximum(magnitude @ filterbank(mel_bins), _FLOOR)).astype(np.float32)


def quantise(values: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Index of the nearest centre, the lower of two; values beyond the ends take the last. uint8."""
    clipped = np.clip(values, centres[0], centres[-1])
    return np.abs(clipped[..., None] - centres).argmin(-1).astype(np.uint8)


@functools.cache
def filterbank(mel_bins: int) -> np.ndarray:
    """Triangles over equal steps of Slaney's mel scale, each of area 1 in hertz. [801, mel_bins] float64."""
    edges = _hertz(np.linspace(0.0, _mel(SAMPLE_RATE / 2), mel_bins + 2))
    lower, peak, upper = edges[:-2], edges[1:-1], edges[2:]
    frequencies = np.arange(WINDOW // 2 + 1)[:, None] * (SAMPLE_RATE / WINDOW)
    rising, falling = (frequencies - lower) / (peak - lower), (upper - frequencies) / (upper - peak)
    triangles = np.maximum(0.0, np.minimum(rising, falling)) * 2 / (upper - lower)
    return triangles.astype(np.float32).astype(np.float64)  # the reference keeps it in float32


@functools.cache
def _hann() -> np.ndarray:
    """Periodic, of float32 values."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32).astype(np.float64)


def _mel(hertz: float) -> float:
    return _BREAK_MEL + _MEL_PER_LOG * float(np.log(hertz / _BREAK_HZ))  # above the break


def _hertz(mel: np.ndarray) -> np.ndarray:
    above = _BREAK_HZ * np.exp((mel - _BREAK_MEL) / _MEL_PER_LOG)
    return np.where(mel < _BREAK_MEL, mel * (_BREAK_HZ / _BREAK_MEL), above)


def _blocks(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """What each block of frames sees: 800 samples of the past, then BLOCK_FRAMES * 800; the last one is shorter."""
    block, filled = np.zeros((BLOCK_FRAMES + 1) * HOP), HOP
    for piece in pieces:
        taken = 0
        while taken < len(piece):
            count = min(len(piece) - taken, len(block) - filled)
            block[filled : filled + count] = piece[taken : taken + count]
            taken, filled = taken + count, filled + count
            if filled == len(block):
                yield block
                block[:HOP], filled = block[-HOP:], HOP
    if filled > HOP:
        end = (1 + num_frames(filled - HOP)) * HOP
        block[filled:end] = 0.0
        yield block[:end]
