"""Pictures and sound through their towers, in batches of few sizes, so that little is compiled."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from modeling.architecture import Model
from modeling.inkling.model import Inkling

# Rows (patches or frames) that a tower takes at once: the last batch of an item takes the smallest that holds it.
BATCHES = (32, 512)

# The tower on one batch: rows of one of the sizes above -> [rows, hidden_size].
RunTower = Callable[[np.ndarray], jax.Array]


def tower_rows(model: Model) -> dict[str, tuple[int, ...]]:
    """The shape of one row of each tower that the model has."""
    rows = {}
    if isinstance(model, Inkling) and model.vision is not None:
        rows["image"] = model.vision.row
    if isinstance(model, Inkling) and model.audio is not None:
        rows["audio"] = model.audio.row
    return rows


def tower_output(model: Model, kind: str, rows: jax.Array) -> jax.Array:
    """rows of pictures [n, time, height, width, channels] float32, or of sound [n, mel_bins] -> [n, hidden_size]."""
    if kind == "image":
        assert isinstance(model, Inkling) and model.vision is not None
        return model.vision(rows.astype(model.dtype))
    assert isinstance(model, Inkling) and model.audio is not None
    return model.audio(rows, model.dtype)


def in_batches(rows: np.ndarray, run: RunTower) -> np.ndarray:
    """Tower outputs [n, hidden_size] of n rows, on the host; each row's is the same in any batch."""
    outs, start = [], 0
    while start < len(rows):
        left = len(rows) - start
        size = next((size for size in BATCHES if size >= left), BATCHES[-1])
        part = rows[start : start + size]
        padded = np.zeros((size, *rows.shape[1:]), rows.dtype)
        padded[: len(part)] = part
        outs.append(np.asarray(run(padded))[: len(part)])
        start += size
    return np.concatenate(outs)


def embed_media(model: Model, kind: str, rows: np.ndarray) -> np.ndarray:
    """As `in_batches`, compiling what is needed."""
    return in_batches(rows, lambda part: _jitted_tower(model, kind, jnp.asarray(part)))


_jitted_tower = jax.jit(tower_output, static_argnames="kind")
