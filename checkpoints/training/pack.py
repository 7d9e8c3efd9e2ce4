"""Packs conversations into rows of one length, in worker processes, so that the trainer never waits for text."""

import multiprocessing
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from checkpoints.training.conversation import Conversation
from checkpoints.training.corpus import ALL_KINDS, draw
from checkpoints.training.render import encode


@dataclass
class Packed:
    """Rows of packed conversations. Arrays are [rows, length]; segment 0 is padding, others count up in each row."""

    tokens: np.ndarray  # uint16
    segments: np.ndarray  # uint8
    produced: np.ndarray  # bool, tokens that the model must produce
    kinds: dict[tuple[int, int], str]  # (row, segment) -> kind


def pack(
    conversations: list[Conversation], length: int, rows: int | None = None, last_turn_only: bool = False
) -> Packed:
    """First fit, longest first. With `rows` given, what does not fit is left out; otherwise rows are added."""
    encoded = [(*encode(c), c.kind) for c in conversations]
    encoded = sorted((e for e in encoded if len(e[0]) <= length), key=lambda e: -len(e[0]))
    contents: list[list] = [[] for _ in range(rows or 0)]
    room = [length] * len(contents)
    for item in encoded:
        row = next((r for r, left in enumerate(room) if left >= len(item[0])), None)
        if row is None:
            if rows is not None:
                continue
            contents.append([])
            room.append(length)
            row = len(room) - 1
        contents[row].append(item)
        room[row] -= len(item[0])
    packed = Packed(
        np.zeros((len(contents), length), np.uint16), np.zeros((len(contents), length), np.uint8),
        np.zeros((len(contents), length), bool), {},
    )  # fmt: skip
    for row, items in enumerate(contents):
        at = 0
        for segment, (ids, mask, start, kind) in enumerate(items, 1):
            here = slice(at, at + len(ids))
            packed.tokens[row, here], packed.segments[row, here] = ids, segment
            packed.produced[row, here] = mask & (np.arange(len(ids)) >= start) if last_turn_only else mask
            packed.kinds[row, segment] = kind
            at += len(ids)
    return packed


def training_batch(seed: int, index: int, rows: int, length: int) -> Packed:
    """Batch `index` of a run: a function of its arguments alone."""
    rng = Random(f"{seed}-{index}")
    conversations, total = [], 0
    while total < rows * length * 0.97:
        conversation = draw(rng)
        if (tokens := len(encode(conversation)[0])) <= length:
            conversations.append(conversation)
            total += tokens
    batch = pack(conversations, length, rows)
    batch.kinds = {}  # not needed in training; keeps what travels between processes small
    return batch


def held_out_batch(per_kind: int, length: int, seed: int = 0) -> Packed:
    """`per_kind` held-out conversations of every kind; only the last turn counts."""
    rng = Random(f"held-out-{seed}")
    return pack([draw(rng, True, kind) for kind in ALL_KINDS for _ in range(per_kind)], length, last_turn_only=True)


def _work(arguments: tuple[int, int, int, int]) -> Packed:
    return training_batch(*arguments)


def batches(seed: int, rows: int, length: int, workers: int, start: int = 0) -> Iterator[Packed]:
    """Training batches in order, made ahead by `workers` processes (0: in this one)."""
    if workers == 0:
        index = start
        while True:
            yield training_batch(seed, index, rows, length)
            index += 1
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        ahead: deque = deque()
        index = start
        while True:
            while len(ahead) < 4 * workers:
                ahead.append(pool.apply_async(_work, ((seed, index, rows, length),)))
                index += 1
            yield ahead.popleft().get()
