"""Accepting drafts leaves the distribution of tokens as it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modeling.sampling import make_sampling_state, record, sample, top_logprobs
from serve.speculative import SpeculationCount, verify

VOCAB, ROWS = 7, 20_000


LOGITS = np.random.default_rng(0).standard_normal((3, VOCAB)).astype(np.float32)
DRAFT = np.argsort(LOGITS)[:2, -2].tolist()  # the second most likely token at each place


def drawn(temperature: float, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """ROWS sequences with keys of their own through one step: tokens and validity [places, rows]."""
    rng = np.random.default_rng(1)
    state = make_sampling_state(ROWS, VOCAB, num_stops=1)._replace(
        temperature=jnp.full(ROWS, temperature, jnp.float32),
        top_k=jnp.full(ROWS, top_k, jnp.int32),
        key=jnp.asarray(rng.integers(0, 1 << 32, (ROWS, 2), np.uint32)),
    )

    def choose(logits, state):
        tokens = sample(logits, state)
        return tokens, top_logprobs(logits, tokens)

    def take(state, tokens, rows):
        return record(state, tokens, rows), jnp.ones(ROWS, bool)

    @jax.jit
    def step(state):
        everywhere = jnp.broadcast_to(LOGITS, (ROWS, *LOGITS.shape))
        drafts = jnp.broadcast_to(jnp.array(DRAFT, jnp.int32), (ROWS, len(DRAFT)))
        return verify(everywhere, drafts, state, jnp.ones(ROWS, bool), choose, take)[1]

    out = step(state)
    return np.asarray(out.tokens), np.asarray(out.valid)


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_each_place_has_the_targets_distribution(temperature, top_k):
    """Chi-square at each place, over the sequences that came so far; 99.99 % of true samples pass."""
    tokens, valid = drawn(temperature, top_k)
    for place in range(3):
        scaled = LOGITS[place].astype(np.float64) / temperature
        if top_k:
            scaled[np.argsort(scaled)[: VOCAB - top_k]] = -np.inf
        p = np.exp(scaled - scaled.max())
        p /= p.sum()
        came = valid[place]
        counts = np.bincount(tokens[place, came], minlength=VOCAB)
        expected = p * came.sum()
        assert counts[p == 0].sum() == 0
        kept = p > 0
        chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
        assert chi_square < 27.9  # 6 degrees of freedom; fewer with top-k
        if place < 2:  # a draft is accepted as often as it is likely
            assert abs(valid[place + 1].sum() - expected[DRAFT[place]]) < 5 * np.sqrt(expected[DRAFT[place]])


def test_a_place_is_valid_only_after_accepted_drafts():
    tokens, valid = drawn(1.0, 0)
    assert valid[0].all()
    assert (valid[1] == (tokens[0] == DRAFT[0])).all()
    assert (valid[2] == valid[1] & (tokens[1] == DRAFT[1])).all()


def test_counts_of_accepted_drafts():
    count = SpeculationCount()
    for drafted, accepted in ((3, 3), (3, 0), (3, 1), (1, 1)):
        count.add(drafted, accepted)
    now = count.snapshot()
    assert (now.num_steps, now.num_draft_tokens, now.num_accepted_tokens) == (4, 10, 5)
    assert now.accepted_by_depth == (3, 1, 1)
