"""The tokens that selected an expert, one after the other, its weights kept in registers: Pallas, Triton lowering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.warp_tiles import MAX_TOKENS, Tiles


def tokens_of(weights_ref: Any, slot: Any) -> jax.Array:
    """The tokens that have a weight in weights [slots, tokens] at a slot, NaN included, as a number's bits."""
    num_tokens = weights_ref.shape[1]
    token = lax.iota(jnp.int32, MAX_TOKENS)
    weights = plt.load(weights_ref.at[slot, token], mask=token < num_tokens, other=0.0)
    return jnp.where(weights != 0, 1 << token, 0).sum()


def for_each_token(tiles: Tiles, tokens: jax.Array, ask: Callable, compute: Callable) -> None:
    """Calls `compute(loaded, empty, token)` with what `ask(token)` loads, for each bit of `tokens`. The first token's
    is asked for together with whatever was loaded before, hence the fence in between. If there is none, for weights may
    be 0, it is called once with token 32, which `store_rows` does not store, and with what `ask(0)` loads."""
    first = _lowest(tokens)
    loaded = ask(lax.rem(first, 32))
    empty = tiles.fence()
    compute(loaded, empty, first)

    def more(rest):
        token = _lowest(rest)
        compute(ask(token), empty, token)
        return rest & (rest - 1)

    lax.while_loop(lambda rest: rest != 0, more, tokens & (tokens - 1))


def _lowest(bits: jax.Array) -> jax.Array:
    """The place of the lowest bit."""
    return lax.population_count((bits & -bits) - 1)
