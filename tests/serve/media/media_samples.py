"""Small pictures and sounds as files."""

from __future__ import annotations

import io

import numpy as np
import soundfile
from PIL import Image

from serve.media.format import MediaFormat

FORMAT = MediaFormat(image_token_id=1, audio_token_id=2)


def picture(width: int = 100, height: int = 60, mode: str = "RGB") -> Image.Image:
    """Random colours in blocks of 8, so that JPEG keeps them."""
    rng = np.random.default_rng(width * 1009 + height)
    channels = len(Image.new(mode, (1, 1)).getbands())
    blocks = rng.integers(0, 256, (-(-height // 8), -(-width // 8), channels), dtype=np.uint8)
    pixels = blocks.repeat(8, 0).repeat(8, 1)[:height, :width]
    return Image.fromarray(pixels if channels > 1 else pixels[..., 0], mode)


def image_file(image: Image.Image, format: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def sound(seconds: float = 1.0, rate: int = 16_000, channels: int = 1) -> np.ndarray:
    """Harmonics up to 3.4 kHz that swell and fade, the same at every rate; [samples, channels] float32."""
    t = np.arange(round(seconds * rate)) / rate
    phases = np.random.default_rng(0).uniform(0, 2 * np.pi, 38)
    mono = sum(np.sin(2 * np.pi * 90 * (k + 1) * t + phase) for k, phase in enumerate(phases))
    mono *= 0.02 * (1.1 + np.sin(2 * np.pi * 3 * t))
    return np.repeat(mono[:, None].astype(np.float32), channels, axis=1)


def sound_file(samples: np.ndarray, rate: int = 16_000, format: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format, subtype=subtype)
    return buffer.getvalue()
