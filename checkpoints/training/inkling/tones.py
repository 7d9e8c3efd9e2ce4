"""Short synthetic tones: one note of the scale in several octaves and timbres, with noise."""

import io
import wave
from dataclasses import dataclass
from random import Random

import numpy as np

from serve.media.dmel import HOP, SAMPLE_RATE

NOTES = ("C", "C sharp", "D", "D sharp", "E", "F", "F sharp", "G", "G sharp", "A", "A sharp", "B")
FRAMES = (4, 12)  # least and most frames, of 50 ms
OCTAVES = (4, 6)  # C of the lowest: 262 Hz
DETUNE = 0.08  # semitones
# Amplitudes of the harmonics. A pure tone is told from its neighbours only from the fifth octave on: below, the mel
# bands are wider than a semitone.
TIMBRES = {
    "saw": tuple(1 / k for k in range(1, 13)),
    "square": tuple(k % 2 / k for k in range(1, 12)),
    "organ": (1.0, 0.7, 0.4, 0.5, 0.0, 0.3, 0.0, 0.3),
    "reed": (0.5, 0.8, 1.0, 0.7, 0.5, 0.3, 0.2),
    "flute": (1.0, 0.3, 0.1),
    "sine": (1.0,),
}
HIGH_ONLY = ("flute", "sine")


@dataclass(frozen=True)
class Tone:
    """A note and its samples, int16 at 16 kHz."""

    note: str
    samples: np.ndarray


def draw_tone(rng: Random) -> Tone:
    """A random note, octave, timbre, length, loudness and decay."""
    timbre = rng.choice(list(TIMBRES))
    octave = rng.randint(OCTAVES[0] + (timbre in HIGH_ONLY), OCTAVES[1])
    step = rng.randrange(12)
    frequency = 440 * 2 ** (octave - 4 + (step - 9 + rng.uniform(-DETUNE, DETUNE)) / 12)
    time = np.arange(rng.randint(FRAMES[0] * HOP, FRAMES[1] * HOP)) / SAMPLE_RATE
    sound = np.zeros(len(time))
    for harmonic, amplitude in enumerate(TIMBRES[timbre], 1):
        if amplitude and harmonic * frequency < 0.48 * SAMPLE_RATE:
            sound += amplitude * np.sin(2 * np.pi * (harmonic * frequency * time + rng.random()))
    sound *= np.exp(-time / rng.uniform(0.15, 2)) * rng.uniform(0.1, 0.9) / np.abs(sound).max()
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, 10 ** rng.uniform(-5, -2.2), len(time))
    return Tone(NOTES[step], np.clip((sound + noise) * 32767, -32768, 32767).round().astype(np.int16))


def waveform(samples: np.ndarray) -> np.ndarray:
    """int16 samples as sound files are decoded: float32, full scale 1."""
    return samples.astype(np.float32) / 32768


def wav(samples: np.ndarray) -> bytes:
    """int16 samples as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLE_RATE)
        writer.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()
