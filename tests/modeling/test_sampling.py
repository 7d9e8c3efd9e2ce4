"""Sampling on the device: filters against numpy, seeds, penalties, extremes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modeling.sampling import adjust, filter_logits, make_sampling_state, record, sample, top_logprobs


def state(rows=1, vocab=50, **fields):
    new = make_sampling_state(rows, vocab, num_stops=4)
    fields = {"temperature": [1.0] * rows} | fields
    return new._replace(**{name: jnp.asarray(value, getattr(new, name).dtype) for name, value in fields.items()})


def logits(rows=1, vocab=50, seed=0, scale=3.0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, vocab)) * scale, jnp.float32)


def kept(x, top_k=0, top_p=1.0, min_p=0.0):
    args = jnp.array([top_k]), jnp.array([top_p], jnp.float32), jnp.array([min_p], jnp.float32)
    return set(np.flatnonzero(np.isfinite(np.asarray(filter_logits(x - x.max(), *args))[0])))


def many(st, x, draws):
    """Draws of row 0 under `draws` different keys."""
    rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], (draws, *leaf.shape[1:])), st)
    keys = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (draws, 2)), jnp.uint32)
    return np.asarray(jax.jit(sample)(jnp.broadcast_to(x, (draws, x.shape[-1])), rows._replace(key=keys)))


@pytest.mark.parametrize("k", [1, 2, 7, 49, 50])
def test_top_k_keeps_the_k_largest(k):
    x = logits()
    assert kept(x, top_k=k) == set(np.argsort(-np.asarray(x)[0])[:k])


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_sufficient_set(p):
    x = logits()
    probs = np.exp(np.asarray(x, np.float64)[0])
    order = np.argsort(-probs)
    enough = np.searchsorted(np.cumsum(probs[order]) / probs.sum(), p) + 1
    assert kept(x, top_p=p) == set(order[:enough])


@pytest.mark.parametrize("p", [0.01, 0.2, 1.0])
def test_min_p(p):
    x = logits()
    probs = np.exp(np.asarray(x, np.float64)[0])
    assert kept(x, min_p=p) == set(np.flatnonzero(probs >= p * probs.max()))


def test_top_p_is_taken_of_what_top_k_leaves():
    x = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    assert kept(x, top_k=2, top_p=0.5) == {0}  # 0.4 of 0.7 is more than half
    assert kept(x, top_p=0.5) == {0, 1}


def test_filters_keep_ties():
    x = jnp.array([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert kept(x, top_k=2) == {1, 2, 3}
    zeros = jnp.array([[0.0, -0.0, -1.0]])
    assert kept(zeros, top_k=1) == {0, 1}


@pytest.mark.parametrize("top_k", [0, 50, 1000])
def test_sa01_no_limit_means_many_tokens_and_greedy_means_argmax(top_k):
    x = logits(scale=0.5)
    assert len(set(many(state(top_k=[top_k]), x, 300))) > 30
    assert set(many(state(top_k=[top_k], temperature=[0.0]), x, 20)) == {int(jnp.argmax(x))}


@pytest.mark.parametrize(
    "fields", [{"temperature": [t]} for t in (1e-3, 1e-4, 1e-6, 1e-30)] + [{"top_p": [p]} for p in (1e-4, 1e-37, 1e-45)]
)
def test_sa02_extremes_behave_like_argmax(fields):
    x = logits(scale=2000.0)
    assert set(many(state(**fields), x, 50)) == {int(jnp.argmax(x))}


def test_sa03_a_seed_gives_the_same_token_in_any_slot_beside_anyone():
    x = logits(scale=1.0)
    key = [[0, 42]]
    alone = int(sample(x, state(key=key))[0])
    others = logits(rows=4, seed=9)
    for slot in range(4):
        keys = np.random.default_rng(slot).integers(0, 2**32, (4, 2))
        keys[slot] = key[0]
        temperatures = np.array([0.0, 1.0, 0.5, 2.0])
        temperatures[slot] = 1.0
        batch = sample(others.at[slot].set(x[0]), state(rows=4, key=keys, temperature=temperatures))
        assert int(batch[slot]) == alone


def test_draws_follow_the_distribution():
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    draws = many(state(vocab=4), jnp.log(jnp.asarray(probs, jnp.float32))[None], 20000)
    counts = np.bincount(draws, minlength=4)
    chi2 = ((counts - 20000 * probs) ** 2 / (20000 * probs)).sum()
    assert chi2 < 16.3  # 0.1% point for 3 degrees of freedom
    sharp = many(state(vocab=4, temperature=[0.5]), jnp.log(jnp.asarray(probs, jnp.float32))[None], 20000)
    assert abs((sharp == 0).mean() - 0.25 / (probs**2).sum()) < 0.015


def test_consecutive_tokens_of_one_request_use_fresh_randomness():
    x = logits(scale=0.1)
    st, tokens = state(), []
    for _ in range(30):
        token = sample(x, st)
        tokens.append(int(token[0]))
        st = record(st, token, jnp.array([True]))
    assert len(set(tokens)) > 10


def test_penalties_and_bias_match_their_definitions():
    x = logits()
    st = state(
        repetition_penalty=[1.5],
        presence_penalty=[0.7],
        frequency_penalty=[0.2],
        in_prompt=np.arange(50)[None] < 5,
        counts=np.where(np.arange(50) == 9, 3, 0)[None],
        bias=(np.where(np.arange(50) == 11, -100.0, 0.0) + np.where(np.arange(50) == 2, -2.5, 0.0))[None],
    )
    expected = np.asarray(x, np.float64)[0].copy()
    expected[[2, 11]] += [-2.5, -100.0]  # bias comes before the penalties
    for i in [0, 1, 2, 3, 4, 9]:
        expected[i] = expected[i] / 1.5 if expected[i] > 0 else expected[i] * 1.5
    expected[9] -= 3 * 0.2 + 0.7
    np.testing.assert_allclose(adjust(x, st)[0], expected, rtol=1e-5)
    np.testing.assert_array_equal(adjust(x, state()), x)


def test_sa10_stop_ids_are_banned_before_min_tokens_only():
    x = logits()
    best = int(jnp.argmax(x))
    st = state(temperature=[0.0], stop_ids=[[best, -1, -1, -1]], min_tokens=[2])
    assert int(sample(x, st)[0]) != best
    assert int(sample(x, st._replace(num_generated=jnp.array([2])))[0]) == best


def test_sa08_logprobs_are_the_models_own_and_sorted():
    x = logits()
    scores = top_logprobs(x, jnp.array([7]))
    expected = np.asarray(x, np.float64)[0]
    expected = expected - np.log(np.exp(expected).sum())
    np.testing.assert_allclose(scores.chosen[0], expected[7], atol=1e-5)
    order = np.argsort(-expected)[:20]
    np.testing.assert_array_equal(scores.top_ids[0], order)
    np.testing.assert_allclose(scores.top[0], expected[order], atol=1e-5)


def test_inactive_rows_record_nothing():
    st = record(state(rows=2), jnp.array([3, 4]), jnp.array([True, False]))
    assert int(st.counts.sum()) == 1
    assert st.num_generated.tolist() == [1, 0]
