"""Small synthetic pictures: one shape of one colour on a background of another."""

import io
from dataclasses import dataclass
from random import Random

import numpy as np
import PIL.Image

COLOURS = {
    "red": (210, 30, 35), "green": (35, 150, 50), "blue": (35, 65, 205), "yellow": (240, 220, 40),
    "orange": (240, 135, 25), "purple": (130, 45, 160), "white": (243, 243, 243), "black": (18, 18, 18),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross", "ring")
SIDES = (24, 48)  # least and most pixels of a side
JITTER, NOISE = 12, 8  # of a colour, of a pixel


@dataclass(frozen=True)
class Picture:
    """What is in a picture, and its pixels uint8 [height, width, 3]."""

    colour: str
    shape: str
    background: str
    pixels: np.ndarray


def draw_picture(rng: Random) -> Picture:
    """A random shape, colour, background, size and place."""
    colour, background = rng.sample(list(COLOURS), 2)
    shape = rng.choice(SHAPES)
    width, height = rng.randint(*SIDES), rng.randint(*SIDES)
    radius = rng.uniform(8, min(width, height) / 2 - 1)
    x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
    inside = mask(shape, width, height, x, y, radius)
    pixels = np.where(inside[..., None], _shade(rng, colour), _shade(rng, background))
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(0, NOISE), pixels.shape)
    return Picture(colour, shape, background, np.clip(pixels + noise, 0, 255).round().astype(np.uint8))


def mask(shape: str, width: int, height: int, x: float, y: float, radius: float) -> np.ndarray:
    """Which pixels a shape covers, bool [height, width]; its centre is at (x, y) and it reaches `radius` far."""
    across = np.arange(width)[None, :] + 0.5 - x
    down = np.arange(height)[:, None] + 0.5 - y
    distance = np.hypot(across, down)
    box = np.maximum(np.abs(across), np.abs(down))
    match shape:
        case "circle":
            return distance <= radius
        case "ring":
            return (distance <= radius) & (distance >= 0.55 * radius)
        case "square":
            return box <= 0.88 * radius
        case "cross":
            return (box <= radius) & (np.minimum(np.abs(across), np.abs(down)) <= 0.3 * radius)
        case "triangle":  # its point is up
            return (np.abs(down) <= 0.9 * radius) & (2 * np.abs(across) <= down + 0.9 * radius)
    raise ValueError(f"unknown shape {shape!r}")


def _shade(rng: Random, colour: str) -> np.ndarray:
    return np.array([value + rng.uniform(-JITTER, JITTER) for value in COLOURS[colour]])


def png(pixels: np.ndarray) -> bytes:
    """Pixels as a PNG file."""
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return file.getvalue()
