"""The definition of the drafting depths against an independent numpy model, with and without a chain norm."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inkling_oracle import CHAIN_NORM_MISTAKES, MTP_MISTAKES, Oracle, bf
from tiny import relative
from tiny_inkling import random_tokens, tiny_inkling, tiny_inkling_config

from modeling.batch import MediaRows
from modeling.inkling.config import FULL, SLIDING, MTPConfig
from modeling.inkling.model import Inkling
from modeling.inkling.mtp import MTP, mtp_hidden
from modeling.parameters import parameter_names

TOKENS = 40
DEPTHS = (SLIDING, FULL)
MEDIA = (7, 8, 30)  # placeholders


@functools.cache
def tiny(dtype, chain: bool) -> tuple[Inkling, dict[str, np.ndarray]]:
    """The model, and its parameters as float64."""
    sizes: dict[str, Any] = dict(num_hidden_layers=1, layer_types=(FULL,), sparse_layers=(False,))
    model = tiny_inkling(
        dtype=dtype, num_mtp_layers=len(DEPTHS), **sizes, mtp=MTPConfig(DEPTHS, chain_hidden_post_norm=chain)
    )
    leaves = zip(parameter_names(model), jax.tree.leaves(model), strict=True)
    return model, {name: np.asarray(leaf.astype(jnp.float32), np.float64) for name, leaf in leaves}


@jax.jit
def run(model, tokens, media):
    hidden = model.hidden(tokens, media)
    return hidden, mtp_hidden(model, hidden, model.embedded(tokens, media))


@functools.cache
def ours(dtype, chain):
    """Tokens, tower outputs by position, the trunk's hidden states and every depth's."""
    model, _ = tiny(dtype, chain)
    tokens = random_tokens(model, 1, TOKENS)
    rows = bf(np.random.default_rng(1).standard_normal((len(MEDIA), model.config.hidden_size)))
    embeds, here = np.zeros((1, TOKENS, model.config.hidden_size), np.float32), np.zeros((1, TOKENS), bool)
    embeds[0, list(MEDIA)], here[0, list(MEDIA)] = rows, True
    hidden, depths = run(model, tokens, MediaRows(jnp.asarray(embeds, dtype), jnp.asarray(here)))
    to_numpy = lambda x: np.asarray(x[0].astype(jnp.float32), np.float64)  # noqa: E731
    return tokens[0], dict(zip(MEDIA, rows, strict=True)), to_numpy(hidden), [to_numpy(x) for x in depths]


def theirs(chain, wrong=""):
    """Every depth's output for the head, unrounded, from the tokens on."""
    (model, params), (tokens, media, *_) = tiny(jnp.float32, chain), ours(jnp.float32, chain)
    oracle = Oracle(model.config, params, wrong, rounding=False)
    trunk = Oracle(model.config, params, rounding=False)
    hidden = trunk.hidden(tokens, media, final_norm=wrong != "hidden before the final norm")
    return oracle.depths(hidden, oracle.embedded(tokens, media))


@pytest.mark.parametrize("chain", [False, True])
def test_float32_depths_equal_the_oracle(chain):
    *_, depths = ours(jnp.float32, chain)
    assert [x.shape[0] for x in depths] == [TOKENS - 1, TOKENS - 2]
    for got, want in zip(depths, theirs(chain), strict=True):
        assert relative(got, want) < 2e-6


@pytest.mark.parametrize("depth", range(2))
@pytest.mark.parametrize("mistake", MTP_MISTAKES)
def test_each_wrong_depth_would_be_noticed(mistake, depth):
    *_, depths = ours(jnp.float32, False)
    assert relative(theirs(False, mistake)[depth], depths[depth]) > 1e-2


@pytest.mark.parametrize("mistake", CHAIN_NORM_MISTAKES)
def test_each_wrong_chain_norm_would_be_noticed(mistake):
    *_, depths = ours(jnp.float32, True)
    assert max(relative(a, b) for a, b in zip(theirs(True, mistake), depths, strict=True)) > 1e-2


def test_bfloat16_depth_equals_the_oracle_but_for_sums_that_fall_on_a_rounding_edge():
    """The first depth, from the model's own hidden states; later ones read what an edge moved."""
    (model, params), (tokens, media, hidden, depths) = tiny(jnp.bfloat16, True), ours(jnp.bfloat16, True)
    right, wrong = (Oracle(model.config, params, mistake) for mistake in ("", "norm rounds before the weight"))
    share = [float((x.depths(hidden, x.embedded(tokens, media))[0] != depths[0]).mean()) for x in (right, wrong)]
    assert share[0] < 0.05  # one value of one row, and what it moves in the rows after it
    assert share[1] > 0.5


def test_logits_of_a_depth_are_the_trunks_head_on_its_output():
    """Divided by the width multiplier, without the trunk's final norm."""
    (model, params), (*_, depths) = tiny(jnp.float32, False), ours(jnp.float32, False)
    expected = depths[1] @ params["unembed.weight"][: model.config.kept_vocab_size].T
    got = model.logits(jnp.asarray(depths[1], jnp.float32))
    assert relative(got, expected / model.config.logits_mup_width_multiplier) < 1e-6


def test_a_depth_sees_no_later_row_and_no_later_token():
    """Row p of depth n reads the trunk's rows up to p and tokens up to p + n + 1."""
    model, _ = tiny(jnp.float32, False)
    tokens = random_tokens(model, 1, TOKENS)
    nothing = MediaRows(jnp.zeros((1, TOKENS, model.config.hidden_size)), jnp.zeros((1, TOKENS), bool))
    _, before = run(model, tokens, nothing)
    changed = tokens.copy()
    changed[0, 20] = (tokens[0, 20] + 1) % 100
    _, after = run(model, changed, nothing)
    for n, (a, b) in enumerate(zip(before, after, strict=True)):
        moved = np.asarray(a != b).any(-1)[0]
        assert int(moved.argmax()) == 20 - n - 1


def test_more_depths_than_the_config_describes_are_refused():
    config = tiny_inkling_config()
    with pytest.raises(ValueError, match="describes 3 depths, not 4"):
        MTP(config, 4)
    with pytest.raises(ValueError, match="describes 0 depths, not 1"):
        MTP(tiny_inkling_config(mtp=None), 1)
