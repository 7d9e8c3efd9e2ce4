"""Top-k of router logits inside a kernel: Pallas, Triton lowering.

Logits [tokens, experts] lie in arrays [tokens, 32], one for 32 experts, so that a reduction over experts stays within a
warp, where integers have an instruction for it (`redux.sync`). Floats are compared as the integers of the same order.

A step's distinct experts are its slots. Each is read once, whatever the number of its tokens.
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


def select(logits_ref, valid_ref, num_tokens: int, num_experts: int, top_k: int) -> Selection:
    """The `top_k` largest logits of each token that is valid (None: all are), the lower index first among equals."""
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
    selects = token < num_tokens
    if valid_ref is not None:
        selects &= plt.load(valid_ref.at[token], mask=selects, other=False).astype(jnp.bool)
    chosen = [here & selects for here in chosen]
    scores = [jnp.where(here, 1 / (1 + jnp.exp(-value)), 0.0) for here, value in zip(chosen, logits, strict=True)]
    return Selection(chosen, scores, _fold(jnp.add, scores).sum(axis=1))


def select_row(logits_ref, num_experts: int, top_k: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """One token's experts in the order of their logits, and their scores (sigmoids): `top_k` numbers each."""
    lane = lax.broadcasted_iota(jnp.int32, (WARP,), 0)
    chunks, keys = range(0, num_experts, WARP), []
    for first in chunks:
        inside = first + lane < num_experts
        value = plt.load(logits_ref.at[lane * 0, first + lane], mask=inside, other=0.0)
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


def routing_weights(scores: list[jax.Array], total: jax.Array, normalise: bool, rounded: bool) -> list[jax.Array]:
    """The weights that scores become, over their `total` (per token) if they are normalised; spec 4.8."""
    if normalise:
        scores = [score / (total + 1e-20) for score in scores]
    return [score.astype(jnp.bfloat16).astype(jnp.float32) for score in scores] if rounded else scores


def _ordered(value: jax.Array) -> jax.Array:
    """Floats as integers of the same order, -0 below +0: that of `lax.top_k` (spec 4.8)."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def slots(selection: Selection) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
    """For each 32 experts which are used, bool [32], and their slots, int32 [32]; and the number of slots."""
    lane = lax.broadcasted_iota(jnp.int32, (WARP,), 0)
    before, used, places = jnp.int32(0), [], []
    for chosen in selection.chosen:
        here = chosen.astype(jnp.int32).max(axis=0)
        mask = (here << lane).sum()
        used.append(here > 0)
        places.append(before + lax.population_count(mask & ((1 << lane) - 1)))
        before = before + lax.population_count(jnp.broadcast_to(mask, (WARP,))).max()
    return used, places, before


def _fold(operation, arrays):
    """All arrays into one, as a tree: fewer steps that wait for each other."""
    while len(arrays) > 1:
        odd = arrays[len(arrays) // 2 * 2 :]
        arrays = [operation(a, b) for a, b in zip(arrays[0::2], arrays[1::2], strict=False)] + odd
    return arrays[0]
