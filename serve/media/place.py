"""Where pictures and sound stand in a prompt: each run of placeholder tokens belongs to one of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serve.media.content import MediaItem
from serve.media.errors import UnusableMedia
from serve.request import Media


def place(
    token_ids: Sequence[int], items: Sequence[MediaItem], image_token_id: int | None, audio_token_id: int | None
) -> tuple[Media, ...]:
    """Gives every item its placeholders: the first item the first run of them, and so on.

    A run is as many equal placeholder tokens as stand together; chat templates keep items apart by other tokens.

    Raises:
        UnusableMedia: the runs and the items differ in number, kind or length. Nothing is ever shifted.
    """
    kinds = {image_token_id: "image", audio_token_id: "audio"}
    runs = placeholder_runs(token_ids, *(token for token in kinds if token is not None))
    if len(runs) != len(items):
        message = f"The prompt has placeholders for {len(runs)} pictures and clips, and {len(items)} came with it"
        raise UnusableMedia(message + "; give each its own run of placeholder tokens.")
    placed = []
    for number, ((token, offset, length), item) in enumerate(zip(runs, items, strict=True)):
        if kinds[token] != item.kind:
            raise UnusableMedia(f"Item {number} is {item.kind}, but its placeholders in the prompt are {kinds[token]}.")
        if len(item.rows) != length:
            message = f"Item {number} ({item.kind}) has {len(item.rows)} rows, but {length} placeholders in the prompt"
            raise UnusableMedia(message + "; there must be one for each row.")
        placed.append(Media(item.kind, item.rows, offset))
    return tuple(placed)


def placeholder_runs(token_ids: Sequence[int], *placeholders: int) -> list[tuple[int, int, int]]:
    """Runs of equal tokens among `placeholders`, in order: token, offset, length."""
    ids = np.asarray(token_ids, np.int64)
    ids = np.where(np.isin(ids, placeholders), ids, -1)
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    ends = np.append(starts, len(ids))[1:]
    return [(int(ids[a]), int(a), int(b - a)) for a, b in zip(starts, ends, strict=True) if ids[a] >= 0]
