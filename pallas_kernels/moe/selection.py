"""Top-k of router logits inside a kernel, by every program for itself: Pallas, Triton lowering.

Logits [tokens, experts] lie in arrays [tokens, 32], one for 32 experts, so that a reduction over experts stays within a
warp, where integers have an instruction for it (`redux.sync`). Floats are compared as the integers of the same order.

A step's distinct experts, in ascending order, are its slots. Each is read once, whatever the number of its tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

WARP = 32
LOWEST = -(2**31)


class Selection(NamedTuple):
    """The selected experts of each token.

    Attributes:
        chosen: for each 32 experts, bool [tokens, 32].
        scores: likewise, float32: the sigmoid where chosen, else 0.
        total: [tokens], the sum of the scores.
    """

    chosen: list[jax.Array]
    scores: list[jax.Array]
    total: jax.Array


def select(logits_ref, num_tokens: int, num_experts: int, top_k: int) -> Selection:
    """The `top_k` largest logits of each token, the lower index first among equals."""
    shape = (pl.next_power_of_2(num_tokens), WARP)
    token, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
    chunks = range(0, num_experts, WARP)
    logits, keys = [], []
    for first in chunks:
        inside = (token < num_tokens) & (first + lane < num_experts)
        value = plt.load(logits_ref.at[token, first + lane], mask=inside, other=0.0)
        logits.append(value)
        keys.append(jnp.where(inside, _ordered(value), LOWEST))
    chosen = [jnp.zeros(shape, jnp.bool_) for _ in chunks]
    for _ in range(top_k):
        best = _fold(jnp.maximum, keys).max(axis=1, keepdims=True)
        places = [jnp.where(key == best, first + lane, num_experts) for first, key in zip(chunks, keys, strict=True)]
        place = _fold(jnp.minimum, places).min(axis=1, keepdims=True)
        taken = [first + lane == place for first in chunks]
        keys = [jnp.where(take, LOWEST, key) for take, key in zip(taken, keys, strict=True)]
        chosen = [before | take for before, take in zip(chosen, taken, strict=True)]
    chosen = [here & (token < num_tokens) for here in chosen]
    scores = [jnp.where(here, 1 / (1 + jnp.exp(-value)), 0.0) for here, value in zip(chosen, logits, strict=True)]
    return Selection(chosen, scores, _fold(jnp.add, scores).sum(axis=1))


def select_row(logits_ref, num_experts: int, top_k: int, first_row) -> tuple[list[jax.Array], list[jax.Array]]:
    """One token's experts in the order of their logits, and their scores (sigmoids): `top_k` numbers each.

    `first_row` is 0 and says that other programs of the launch wrote the logits: see `block._wait`.
    """
    lane = lax.broadcasted_iota(jnp.int32, (WARP,), 0)
    chunks, keys = range(0, num_experts, WARP), []
    for first in chunks:
        inside = first + lane < num_experts
        value = plt.load(logits_ref.at[first_row + lane * 0, first + lane], mask=inside, other=0.0, volatile=True)
        keys.append(jnp.where(inside, _ordered(value), LOWEST))
    experts, scores = [], []
    for _ in range(top_k):
        best = _fold(jnp.maximum, keys).max(axis=0)
        places = [jnp.where(key == best, first + lane, num_experts) for first, key in zip(chunks, keys, strict=True)]
        expert = _fold(jnp.minimum, places).min(axis=0)
        keys = [jnp.where(place == expert, LOWEST, key) for place, key in zip(places, keys, strict=True)]
        logit = lax.bitcast_convert_type(best ^ (best >> 31 & 0x7FFFFFFF), jnp.float32)
        experts.append(expert)
        scores.append(1 / (1 + jnp.exp(-logit)))
    return experts, scores


def row_weights(scores: list[jax.Array], normalise: bool, rounded: bool) -> list[jax.Array]:
    """The routing weights of one token's scores."""
    if normalise:
        total = _fold(jnp.add, scores) + 1e-20
        scores = [score / total for score in scores]
    return [score.astype(jnp.bfloat16).astype(jnp.float32) for score in scores] if rounded else scores


def _ordered(value: jax.Array) -> jax.Array:
    """Floats as integers of the same order; the two zeros are equal."""
    bits = lax.bitcast_convert_type(value + 0.0, jnp.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def routing_weights(selection: Selection, expert, normalise: bool, rounded: bool) -> jax.Array:
    """Each token's weight of one expert, float32 [tokens]; 0 where it was not selected."""
    lane = lax.broadcasted_iota(jnp.int32, selection.scores[0].shape, 1)
    here = [jnp.where(i * WARP + lane == expert, score, 0.0) for i, score in enumerate(selection.scores)]
    weight = _fold(jnp.add, here).sum(axis=1)
    if normalise:
        weight = weight / (selection.total + 1e-20)
    return weight.astype(jnp.bfloat16).astype(jnp.float32) if rounded else weight


def slot_expert(selection: Selection, slot) -> tuple[jax.Array, jax.Array]:
    """The expert of a slot, -1 past the last; and the number of slots that have one."""
    lane = lax.broadcasted_iota(jnp.int32, (WARP,), 0)
    before, found = jnp.int32(0), []
    for i, chosen in enumerate(selection.chosen):
        used = chosen.astype(jnp.int32).max(axis=0)
        mask = (used << lane).sum()
        rank = before + lax.population_count(mask & ((1 << lane) - 1))
        found.append(jnp.where((used > 0) & (rank == slot), i * WARP + lane, -1))
        before = before + lax.population_count(jnp.broadcast_to(mask, (WARP,))).max()
    return _fold(jnp.maximum, found).max(), before


def _fold(operation, arrays):
    """All arrays into one, as a tree: fewer steps that wait for each other."""
    while len(arrays) > 1:
        odd = arrays[len(arrays) // 2 * 2 :]
        arrays = [operation(a, b) for a, b in zip(arrays[0::2], arrays[1::2], strict=False)] + odd
    return arrays[0]
