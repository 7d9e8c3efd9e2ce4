"""dMel against the reference, and its independence of how the sound arrives."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from media_samples import sound

from serve.media.dmel import BLOCK_FRAMES, HOP, dmel, filterbank, log_mel, num_frames, quantise

FIXTURE = Path(__file__).parents[2] / "fixtures" / "inkling-preprocess" / "expected.npz"


@pytest.mark.parametrize("number", range(5))
def test_bins_are_exactly_the_reference_s(number):
    expected = np.load(FIXTURE)
    wave, bins = expected[f"wave{number}"], expected[f"dmel{number}"]
    result = dmel([wave])
    assert result.dtype == np.uint8
    np.testing.assert_array_equal(result, bins)
    padded = np.zeros((len(bins) + 1) * HOP)
    padded[HOP : HOP + len(wave)] = wave
    np.testing.assert_allclose(log_mel(padded), expected[f"logmel{number}"], atol=2e-6)  # float32's rounding


def test_the_filterbank_has_area_one_and_covers_the_spectrum():
    bank = filterbank(80)
    assert bank.shape == (801, 80) and (bank >= 0).all()
    np.testing.assert_allclose(bank.sum(0)[20:] * 10, 1, atol=0.05)  # the narrow low bands see few of the FFT's lines
    assert (bank.sum(1)[1:-1] > 0).all()


def test_quantise_takes_the_nearest_and_the_lower_of_two():
    centres = np.float32([0, 1, 2])
    np.testing.assert_array_equal(
        quantise(np.float32([-5, 0.49, 0.5, 0.51, 1.5, 1.75, 9]), centres), [0, 0, 0, 1, 1, 2, 2]
    )


@pytest.mark.parametrize(("samples", "frames"), [(1, 1), (799, 1), (800, 1), (801, 2), (16_000, 20)])
def test_au02_frames_of_short_clips(samples, frames):
    assert num_frames(samples) == frames
    assert dmel([np.ones(samples, np.float32)]).shape == (frames, 80)


@pytest.mark.parametrize("piece", [1, 777, 800, 4096, BLOCK_FRAMES * HOP, BLOCK_FRAMES * HOP + 1])
def test_au04_pieces_of_any_size_give_the_same_frames(piece):
    seconds = 2 * BLOCK_FRAMES / 20 + 0.33 if piece > 1 else 0.25
    wave = sound(seconds)[:, 0]
    whole = dmel([wave])
    np.testing.assert_array_equal(dmel(wave[i : i + piece] for i in range(0, len(wave), piece)), whole)
    # And the same as the definition, over everything at once.
    padded = np.zeros((len(whole) + 1) * HOP)
    padded[HOP : HOP + len(wave)] = wave
    np.testing.assert_array_equal(quantise(log_mel(padded), np.linspace(-7, 2, 16).astype(np.float32)), whole)


def test_au04_thirty_minutes_take_no_more_memory_than_one():
    second, peaks = sound(1)[:, 0], {}
    for seconds in (60, 1800):
        tracemalloc.start()
        frames = dmel(second for _ in range(seconds))
        peaks[seconds] = tracemalloc.get_traced_memory()[1] - 2 * frames.nbytes  # collected, then joined
        tracemalloc.stop()
        assert frames.shape == (20 * seconds, 80)
        np.testing.assert_array_equal(frames[-20:], frames[20:40])
    assert peaks[1800] < 1.2 * peaks[60] < 15e6


def test_other_sizes_follow_the_checkpoint():
    wave = sound(0.5)[:, 0]
    result = dmel([wave], mel_bins=40, levels=256, low=-5, high=1)
    assert result.shape == (10, 40) and result.max() > 128
