"""Packs conversations and their media into rows of one length, in worker processes."""

import multiprocessing
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import ml_dtypes
import numpy as np

from checkpoints.training.inkling.corpus import ALL_KINDS, draw
from checkpoints.training.inkling.render import MEL_BINS, Encoded, encode, media_format
from checkpoints.training.inkling.shape import config_json

PATCHES, FRAMES = 64, 16  # room for tower rows, for each packed row


@dataclass
class Packed:
    """Packed conversations. Arrays of text are [rows, length]; segment 0 is padding, others count up in each row.

    Attributes:
        patches, patch_at, frames, frame_at: see `forward.Rows`.
        last: (row, first token to produce of the last turn, end of the conversation) -> kind.
    """

    tokens: np.ndarray  # uint16
    segments: np.ndarray  # uint16
    produced: np.ndarray  # bool, tokens that the model must produce
    patches: np.ndarray  # bfloat16
    patch_at: np.ndarray  # int32
    frames: np.ndarray  # uint8
    frame_at: np.ndarray  # int32
    last: dict[tuple[int, int, int], str]


def pack(items: list[tuple[str, Encoded]], rows: int, length: int) -> tuple[Packed, list[tuple[str, Encoded]]]:
    """First fit, longest first; also returns the conversations that found no place.

    Args:
        items: kind and conversation; none may be longer than a row.
    """
    edge = media_format().patch_size
    packed = Packed(
        np.zeros((rows, length), np.uint16),
        np.zeros((rows, length), np.uint16),
        np.zeros((rows, length), bool),
        np.zeros((rows * PATCHES, edge, edge, 3), ml_dtypes.bfloat16),
        np.full(rows * PATCHES, rows * length, np.int32),
        np.zeros((rows * FRAMES, MEL_BINS), np.uint8),
        np.full(rows * FRAMES, rows * length, np.int32),
        {},
    )
    image, audio = config_json()["image_token_id"], config_json()["audio_token_id"]
    ends, segments, patches, frames, left = [0] * rows, [0] * rows, 0, 0, []
    for kind, item in sorted(items, key=lambda item: -len(item[1].ids)):
        count = len(item.ids)
        row = next((row for row, end in enumerate(ends) if length - end >= count), None)
        more = (patches + len(item.patches), frames + len(item.frames))
        if row is None or more[0] > len(packed.patches) or more[1] > len(packed.frames):
            left.append((kind, item))
            continue
        at = ends[row]
        here = slice(at, at + count)
        segments[row] += 1
        packed.tokens[row, here], packed.segments[row, here] = item.ids, segments[row]
        packed.produced[row, here] = item.produced
        packed.patches[patches : more[0]], packed.frames[frames : more[1]] = item.patches, item.frames
        packed.patch_at[patches : more[0]] = row * length + at + np.flatnonzero(item.ids == image)
        packed.frame_at[frames : more[1]] = row * length + at + np.flatnonzero(item.ids == audio)
        packed.last[row, at + item.start, at + count] = kind
        ends[row], (patches, frames) = at + count, more
    return packed, left


def training_batch(seed: int, index: int, rows: int, length: int) -> Packed:
    """Batch `index` of a run: a function of its arguments alone."""
    rng = Random(f"{seed}-{index}")
    items, total = [], 0
    while total < rows * length * 0.97:
        conversation = draw(rng)
        item = encode(conversation)
        if len(item.ids) <= length:
            items.append((conversation.kind, item))
            total += len(item.ids)
    packed, _ = pack(items, rows, length)
    packed.last = {}  # not needed in training; keeps what travels between processes small
    return packed


def held_out_batches(per_kind: int, rows: int, length: int, seed: int = 0) -> list[Packed]:
    """`per_kind` held-out conversations of every kind."""
    rng = Random(f"held-out-{seed}")
    drawn = [draw(rng, True, kind) for kind in ALL_KINDS for _ in range(per_kind)]
    encoded = [(conversation.kind, encode(conversation)) for conversation in drawn]
    left = [(kind, item) for kind, item in encoded if len(item.ids) <= length]
    batches = []
    while left:
        packed, left = pack(left, rows, length)
        batches.append(packed)
    return batches


def _work(arguments: tuple[int, int, int, int]) -> Packed:
    return training_batch(*arguments)


def batches(seed: int, rows: int, length: int, workers: int) -> Iterator[Packed]:
    """Training batches in order, made ahead by `workers` processes."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        ahead: deque = deque()
        index = 0
        while True:
            while len(ahead) < 4 * workers:
                ahead.append(pool.apply_async(_work, ((seed, index, rows, length),)))
                index += 1
            yield ahead.popleft().get()
