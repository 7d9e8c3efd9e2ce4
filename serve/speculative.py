"""Speculative decoding: draft with the model's own depths, check all drafts in one step of the trunk.

A draft is accepted when it is the token that sampling would have chosen at its place anyway, with the random numbers
of that place. At temperature 0 that is the most likely token. Above it, a draft d is accepted with probability p(d) and
otherwise replaced by a token of p without d, renormalised: exactly rejection sampling of a proposal that is certain of
d (spec section 5.3). So the distribution is the target's own, and a seed gives the same tokens with speculation as
without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from modeling.architecture import Model
from modeling.sampling import TopLogprobs
from serve.request import Speculation

# Tokens drafted a step where nobody says how many. Checking more rows touches more experts, so that ever longer drafts
# cost more than they bring.
DRAFT_TOKENS = 4


def num_draft_tokens(model: Model, asked: int | None) -> int:
    """Tokens to draft a step: `asked`, or with None `DRAFT_TOKENS` or as many as the model can.

    Raises:
        ValueError: more than the model has depths for.
    """
    depths = model.num_mtp_layers
    if asked is None:
        return min(DRAFT_TOKENS, depths)
    if not 0 <= asked <= depths:
        raise ValueError(
            f"num_draft_tokens must be 0..{depths}, not {asked}: each draft needs a depth of its own and the model "
            f"has {depths}"
        )
    return asked


class SpeculationCount:
    """Counts one request's drafts; see `serve.request.Speculation`."""

    def __init__(self):
        self.num_steps = self.num_draft_tokens = 0
        self.accepted_by_depth: list[int] = []

    def add(self, drafted: int, accepted: int) -> None:
        """One step's drafts, of which the first `accepted` became output."""
        self.num_steps += 1
        self.num_draft_tokens += drafted
        self.accepted_by_depth += [0] * (drafted - len(self.accepted_by_depth))
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1

    def snapshot(self) -> Speculation:
        """The counts as they are now."""
        accepted = tuple(self.accepted_by_depth)
        return Speculation(self.num_steps, self.num_draft_tokens, sum(accepted), accepted)


class Verified(NamedTuple):
    """Tokens that one step gave, place by place: `tokens` and `valid` [places, slots], `logprobs` likewise."""

    tokens: jax.Array
    valid: jax.Array
    logprobs: TopLogprobs


# (logits [slots, vocab], state) -> tokens [slots], log-probabilities.
Choose = Callable[[jax.Array, Any], tuple[jax.Array, TopLogprobs]]
# (state, tokens [slots], rows [slots] bool) -> the state with the tokens taken into those rows, and [slots] bool:
# whether a row goes on after its token.
Take = Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]


def verify(
    logits: jax.Array, drafts: jax.Array, state: Any, active: jax.Array, choose: Choose, take: Take
) -> tuple[Any, Verified]:
    """Goes along the places of each slot until its sampled token is not the draft, or ends it.

    Args:
        logits: [slots, places, vocab]: after the newest token, then after each draft.
        drafts: [slots, places - 1] int32.
        active: [slots] bool, the slots that take part.

    Returns:
        The state after all tokens, and the tokens.
    """
    # No token equals -1: nothing follows the last place.
    expected = jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=-1)

    def place(carry: tuple[Any, jax.Array], at: tuple[jax.Array, jax.Array]) -> tuple[Any, Verified]:
        (state, going), (logits, expected) = carry, at
        tokens, logprobs = choose(logits, state)
        tokens = jnp.where(going, tokens, 0)
        state, goes_on = take(state, tokens, going)
        return (state, going & goes_on & (tokens == expected)), Verified(tokens, going, logprobs)

    (state, _), out = lax.scan(place, (state, active), (logits.swapaxes(0, 1), expected.T))
    return state, out
