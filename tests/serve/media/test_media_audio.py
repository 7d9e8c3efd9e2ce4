"""Sound files: formats, rates, channels, limits, damage."""

import io
import tracemalloc

import numpy as np
import pytest
import soundfile
from media_samples import FORMAT, sound, sound_file
from scipy.signal import resample_poly

from serve.media import audio
from serve.media.audio import audio_frames, mono_16k, resampled
from serve.media.errors import UnusableMedia
from serve.request import InvalidRequest


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT"])
def test_au01_one_second_is_twenty_frames_close_to_those_of_16_khz(rate, channels, subtype):
    frames = audio_frames(sound_file(sound(1, rate, channels), rate, subtype=subtype), FORMAT)
    expected = audio_frames(sound_file(sound(1)), FORMAT)
    assert frames.shape == (20, 80)
    difference = np.abs(frames.astype(int) - expected)[:, :60]  # the bands that hold the sound
    assert difference.max() <= 1 and difference.mean() < 0.01  # values next to the border of two steps


def test_au01_channels_are_mixed_before_resampling():
    stereo = np.concatenate([sound(1, 48_000), sound(1, 48_000)[::-1]], axis=1)
    pieces = list(mono_16k(sound_file(stereo, 48_000, subtype="FLOAT")))
    expected = resample_poly(stereo.mean(1), 1, 3)
    np.testing.assert_allclose(np.concatenate(pieces), expected, atol=1e-6)


@pytest.mark.parametrize(("samples", "tokens"), [(1, 1), (799, 1), (800, 1), (801, 2), (16_000, 20)])
def test_au02_clips_of_few_samples(samples, tokens):
    assert audio_frames(sound_file(sound(1)[:samples]), FORMAT).shape == (tokens, 80)


@pytest.mark.parametrize(
    ("format", "subtype"),
    [
        ("WAV", "ULAW"),
        ("WAV", "DOUBLE"),
        ("WAVEX", None),
        ("FLAC", None),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", None),
    ],
)
def test_formats(format, subtype, tmp_path):
    data = sound_file(sound(2, 48_000, 2), 48_000, format, subtype)
    frames, expected = audio_frames(data, FORMAT), audio_frames(sound_file(sound(2)), FORMAT)
    assert frames.shape == (40, 80)
    loud = expected > 7  # lossy formats drop what nobody hears
    assert np.abs(frames.astype(int) - expected)[loud].mean() < 0.5
    (tmp_path / "sound.bin").write_bytes(data)
    np.testing.assert_array_equal(audio_frames(tmp_path / "sound.bin", FORMAT), frames)


@pytest.mark.parametrize("rate", [8000, 44_100, 44_101, 96_000])
def test_au04_resampling_in_pieces_equals_one_piece(rate, monkeypatch):
    wave = sound(1.37, rate)[:, 0]
    common = np.gcd(rate, 16_000)
    whole = resample_poly(wave, 16_000 // common, rate // common)
    monkeypatch.setattr(audio, "_BLOCK_VALUES", 5000)
    for piece in (len(wave), 777):
        parts = list(resampled((wave[i : i + piece] for i in range(0, len(wave), piece)), rate))
        assert len(parts) > 1 and parts[0].dtype == np.float32
        np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)
    assert len(whole) == -(-len(wave) * 16_000 // rate)


def long_file(seconds: int) -> bytes:
    """The same second again and again."""
    buffer = io.BytesIO()
    with soundfile.SoundFile(buffer, "w", 8000, 2, format="FLAC") as file:
        for _ in range(seconds // 20):
            file.write(np.tile(sound(1, 8000, 2), (20, 1)))
    return buffer.getvalue()


def test_au04_nine_minutes_in_bounded_memory():
    data = long_file(9 * 60)
    tracemalloc.start()
    frames = audio_frames(data, FORMAT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert frames.shape == (10_800, 80)
    assert peak < 20e6  # the samples at 16 kHz alone are 35 MB
    np.testing.assert_array_equal(frames[101:200], frames[9001:9100])


def test_au04_thirty_minutes_are_refused_by_the_header(monkeypatch):
    data = long_file(30 * 60)
    monkeypatch.setattr(audio, "_mono", lambda file: pytest.fail("decoded"))
    with pytest.raises(UnusableMedia, match=r"1800 s, which is more than the 600 s"):
        audio_frames(data, FORMAT)


def test_au04_the_limit_holds_where_the_header_lies(monkeypatch):
    monkeypatch.setattr(audio, "MAX_FRAMES", 40)
    assert len(audio_frames(sound_file(sound(2)), FORMAT)) == 40
    monkeypatch.setattr(audio, "_check", lambda file: None)
    with pytest.raises(UnusableMedia, match="longer than"):
        audio_frames(sound_file(sound(2.001)), FORMAT)


def wav(rate: int) -> bytes:
    data = bytearray(sound_file(sound(0.1)))
    data[24:28] = rate.to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is not a WAV"),
        (b"hello " * 100, "is not a WAV"),
        (sound_file(sound(0)), "no samples"),
        (sound_file(sound(0.1), format="AIFF"), "is AIFF; send WAV"),
        (sound_file(sound(1), format="FLAC")[:-500], "broken"),
        (sound_file(sound(9), format="MP3")[:-8000], "is cut off"),
        (sound_file(sound(1), format="OGG")[:100], "broken"),
        (sound_file(np.float32([0, np.nan]), subtype="FLOAT"), "not numbers"),
        (sound_file(np.float32([0, -np.inf]), subtype="FLOAT"), "not numbers"),
        (sound_file(np.float32([0, 3e38]), subtype="FLOAT"), "too loud"),
        (wav(1), "sample rate is 1 Hz"),
        (wav(2**31 - 1), "sample rate is 2147483647 Hz"),
        (sound_file(np.zeros((9, 65))), "65 channels"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # files differ from run to run
)
def test_files_that_cannot_be_used_are_refused_with_a_reason(data, says):
    with pytest.raises(UnusableMedia, match=says):
        audio_frames(data, FORMAT)
    assert issubclass(UnusableMedia, InvalidRequest)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UnusableMedia, match="no sound file"):
        audio_frames(tmp_path / "absent.wav", FORMAT)


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG"])
def test_damaged_headers_are_refused_or_read_never_more(format):
    data, rng = sound_file(sound(0.5), format=format), np.random.default_rng(0)
    refused = 0
    for _ in range(40):
        damaged = bytearray(data)
        for position in rng.integers(0, 200, 4):
            damaged[position] = rng.integers(256)
        try:
            assert audio_frames(bytes(damaged), FORMAT).shape[1] == 80
        except UnusableMedia:
            refused += 1
    assert refused
