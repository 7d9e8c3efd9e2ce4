"""Sound files to the frames that Inkling reads: decoding, mixing, resampling, in bounded memory (spec 7.3)."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from serve.media.dmel import HOP, SAMPLE_RATE, dmel
from serve.media.errors import UnusableMedia
from serve.media.format import MediaFormat

if TYPE_CHECKING:
    import soundfile

MAX_FRAMES = 12_000  # 10 minutes
MAX_SECONDS = MAX_FRAMES * HOP // SAMPLE_RATE
SAMPLE_RATES = (4_000, 384_000)  # Hz; a resampling filter is as long as the rate is odd
MAX_CHANNELS = 64
LOUDEST = 1e6  # of full scale, in float files; beyond it arithmetic would overflow
FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")  # as libsndfile calls them
_READABLE = "WAV, FLAC, Ogg (Vorbis or Opus) or MP3"
_BLOCK_VALUES = 1 << 18  # decoded at once, of all channels together
_HALF_WIDTH = 10  # zero crossings of the resampling filter on each side
_KAISER_BETA = 5.0


def audio_frames(source: bytes | Path, format: MediaFormat) -> np.ndarray:
    """The frames of a sound file, one for each token. Memory does not depend on the file's length.

    Channels are averaged, then resampled to 16 kHz. A clip may have 12,000 frames (10 minutes); the file's header
    is asked first, so that a longer one costs nothing.

    Args:
        source: the file, or its path: WAV, FLAC, Ogg (Vorbis or Opus) or MP3.
        format: what the model reads.

    Returns:
        [frames, mel_bins] uint8; a frame is 50 ms, the last one may be shorter.

    Raises:
        UnusableMedia: no such sound file, broken, without a sample, too long, or with samples that are NaN, infinite or
            beyond LOUDEST.
    """
    return dmel(
        mono_16k(source),
        mel_bins=format.num_mel_bins,
        levels=format.mel_vocab_size,
        low=format.dmel_min_value,
        high=format.dmel_max_value,
    )


def mono_16k(source: bytes | Path) -> Iterator[np.ndarray]:
    """A sound file's samples at 16 kHz, channels averaged: float32 pieces of any length; raises as `audio_frames`."""
    try:
        import scipy.signal  # noqa: F401  for `resampled`
        import soundfile
    except ImportError:
        raise UnusableMedia("Reading sound needs soundfile and scipy; install firesteel[media].") from None
    try:
        with soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
            _check(file)
            samples = _mono(file)
            yield from samples if file.samplerate == SAMPLE_RATE else resampled(samples, file.samplerate)
    except (soundfile.SoundFileError, OSError, TypeError, ValueError) as error:
        if isinstance(error, UnusableMedia):
            raise
        if isinstance(source, Path) and not source.is_file():
            raise UnusableMedia(f"There is no sound file {source}.") from None
        raise UnusableMedia(f"The audio is not a {_READABLE} file, or is broken ({_reason(error)}).") from None


def resampled(pieces: Iterable[np.ndarray], rate: int) -> Iterator[np.ndarray]:
    """From `rate` Hz to 16 kHz with one polyphase filter over all pieces; n samples become ceil(n * 16000 / rate).

    Args:
        pieces: float32 mono samples, of any length each.
        rate: Hz.

    Yields:
        float32 mono samples. They are those of `scipy.signal.resample_poly` over the whole sound.
    """
    from scipy.signal import resample_poly

    common = math.gcd(rate, SAMPLE_RATE)
    up, down = SAMPLE_RATE // common, rate // common
    taps = _low_pass(up, down)
    # A block is computed with as many samples on both sides as the filter reaches over, in whole periods of `down`.
    side = down * math.ceil(_HALF_WIDTH * max(up, down) / up / down)
    step = down * max(1, _BLOCK_VALUES // down)
    for block, samples in _overlapping(pieces, step, side):
        first, wanted = side * up // down, math.ceil(samples * up / down)
        yield resample_poly(block, up, down, window=taps)[first : first + wanted].astype(np.float32)


@functools.lru_cache(maxsize=8)
def _low_pass(up: int, down: int) -> np.ndarray:
    """The filter that `resample_poly` would make, in float32 like the samples; made once for many blocks."""
    from scipy.signal import firwin

    widest = max(up, down)
    window: Any = ("kaiser", _KAISER_BETA)
    return np.asarray(firwin(2 * _HALF_WIDTH * widest + 1, 1 / widest, window=window), np.float32)


def _overlapping(pieces: Iterable[np.ndarray], step: int, side: int) -> Iterator[tuple[np.ndarray, int]]:
    """Blocks of `step` samples with `side` more before and after, zeros beyond the ends; and how many are its own."""
    buffer = np.zeros(side, np.float32)
    for piece in pieces:
        buffer = np.concatenate([buffer, piece])
        while len(buffer) >= step + 2 * side:
            yield buffer[: step + 2 * side], step
            buffer = buffer[step:]
    own = len(buffer) - side  # at most step + side of them are left
    buffer = np.concatenate([buffer, np.zeros(side + step, np.float32)])
    for start in range(0, own, step):
        yield buffer[start : start + step + 2 * side], min(step, own - start)


def _check(file: soundfile.SoundFile) -> None:
    """Refuses by the header alone."""
    if file.format not in FORMATS:
        raise UnusableMedia(f"The audio is {file.format}; send {_READABLE}.")
    low, high = SAMPLE_RATES
    if not low <= file.samplerate <= high:
        raise UnusableMedia(f"The audio's sample rate is {file.samplerate} Hz; {low} to {high} can be used.")
    if file.channels > MAX_CHANNELS:
        raise UnusableMedia(f"The audio has {file.channels} channels; mix it down to at most {MAX_CHANNELS}.")
    if file.frames * SAMPLE_RATE > MAX_FRAMES * HOP * file.samplerate and not _length_unknown(file):
        raise _too_long(file.frames / file.samplerate)


def _length_unknown(file: soundfile.SoundFile) -> bool:
    """Streams that were never finished claim the most that can be."""
    return file.frames >= 2**62


def _mono(file: soundfile.SoundFile) -> Iterator[np.ndarray]:
    """Decodes in blocks and averages the channels, counting what comes: a header may be wrong."""
    most = MAX_FRAMES * HOP * file.samplerate // SAMPLE_RATE
    size = max(1, _BLOCK_VALUES // file.channels)
    total = 0
    while len(block := file.read(size, dtype="float32", always_2d=True)):
        total += len(block)
        if total > most:
            raise _too_long(None)
        if not (np.abs(block) <= LOUDEST).all():  # nor NaN
            raise UnusableMedia("The audio has samples that are not numbers, or a million times too loud.")
        yield block.mean(1)
    if total == 0:
        raise UnusableMedia("The audio has no samples.")
    if total < file.frames and not _length_unknown(file):
        raise UnusableMedia(f"The audio is cut off: of {file.frames} samples it has {total}.")


def _too_long(seconds: float | None) -> UnusableMedia:
    length = "is longer than" if seconds is None else f"has {seconds:.0f} s, which is more than"
    return UnusableMedia(f"The audio {length} the {MAX_SECONDS} s that one clip may have. Cut it into several.")


def _reason(error: Any) -> str:
    return str(getattr(error, "error_string", error)).rstrip(".")
