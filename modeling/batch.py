"""One step's input."""

from __future__ import annotations

from typing import NamedTuple

import jax

from modeling.cache import PageTables


class MediaRows(NamedTuple):
    """Tower outputs for the placeholders among a batch's tokens.

    Attributes:
        embeds: [batch, chunk, hidden_size], meaningless where `here` is False.
        here: [batch, chunk] bool, the placeholders.
    """

    embeds: jax.Array
    here: jax.Array


class Batch(NamedTuple):
    """One step's input: a chunk of each row.

    Attributes:
        tokens: [batch, chunk] int32.
        starts: [batch] int32, the position of `tokens[:, 0]`, which is also the number of tokens cached before it.
        lengths: [batch] int32, how many of the chunk's tokens are real; 0 for an idle row.
        pages: where the rows' pages are, those of this chunk included.
        media: what replaces the embeddings of placeholder tokens; None where there are none.
    """

    tokens: jax.Array
    starts: jax.Array
    lengths: jax.Array
    pages: PageTables
    media: MediaRows | None = None
