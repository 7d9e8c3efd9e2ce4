"""Pictures and clips in the engine: their placeholders, and their tower outputs kept by what they contain, so that a
conversation's next turn costs nothing."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from modeling.architecture import Model
from modeling.batch import MediaRows
from modeling.inkling.media import tower_rows
from modeling.inkling.model import Inkling
from serve.request import Media
from serve.validate import Placeholder

# (kind, rows) -> tower outputs [n, hidden_size].
EmbedMedia = Callable[[str, np.ndarray], np.ndarray]


def placeholders(model: Model) -> dict[str, Placeholder]:
    """By kind of media, for the towers that the model has."""
    found = {}
    if isinstance(model, Inkling):
        config, rows = model.config, tower_rows(model)
        if "image" in rows and config.image_token_id is not None:
            found["image"] = Placeholder(config.image_token_id, rows["image"])
        if "audio" in rows and config.audio_token_id is not None and config.audio:
            found["audio"] = Placeholder(config.audio_token_id, rows["audio"], config.audio.mel_vocab_size)
    return found


class TowerCache:
    """Least recently used outputs in host memory. One thread may use it.

    Attributes:
        misses: outputs that had to be computed so far.
    """

    def __init__(self, embed: EmbedMedia, max_bytes: int):
        self._embed, self._max_bytes = embed, max_bytes
        self._outputs: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()
        self._bytes = 0
        self.misses = 0

    def outputs(self, media: Media) -> np.ndarray:
        """Tower outputs [rows, hidden_size] of one picture or clip."""
        key = media.content_hash
        if key in self._outputs:
            self._outputs.move_to_end(key)
            return self._outputs[key]
        self.misses += 1
        outputs = self._embed(media.kind, media.rows)
        self._outputs[key] = outputs
        self._bytes += outputs.nbytes
        while self._bytes > self._max_bytes and len(self._outputs) > 1:
            _, oldest = self._outputs.popitem(last=False)
            self._bytes -= oldest.nbytes
        return outputs


def media_rows(
    media: Sequence[Media], outputs: Sequence[np.ndarray], start: int, length: int, hidden_size: int, dtype: Any
) -> MediaRows | None:
    """What replaces the embeddings of prompt tokens start .. start + length - 1; None where nothing does.

    Args:
        media: those with a placeholder among these tokens.
        outputs: tower outputs [rows, hidden_size] of each of them.
    """
    if not media:
        return None
    embeds = np.zeros((length, hidden_size), dtype)
    here = np.zeros(length, bool)
    for item, rows in zip(media, outputs, strict=True):
        first, last = max(item.offset, start), min(item.offset + len(rows), start + length)
        embeds[first - start : last - start] = rows[first - item.offset : last - item.offset]
        here[first - start : last - start] = True
    return MediaRows(embeds, here)  # pyright: ignore[reportArgumentType]
