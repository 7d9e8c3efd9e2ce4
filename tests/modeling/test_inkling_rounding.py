"""Inkling's layers against an independent numpy model: every rule in float32, every rounding in bfloat16."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inkling_oracle import (
    ATTENTION_MISTAKES,
    CONVOLUTION_MISTAKES,
    DENSE_MISTAKES,
    MODEL_MISTAKES,
    ROUNDING_MISTAKES,
    SPARSE_MISTAKES,
    Oracle,
    bf,
)
from tiny import relative
from tiny_inkling import CachedInkling, definition, random_tokens, tiny_inkling

from modeling.batch import MediaRows
from modeling.inkling.layer import Step
from modeling.parameters import parameter_names

TOKENS = 48  # more than the window of 9, the extent of 20 and the floor of 24
LAYERS = range(4)  # sliding dense, full dense, sliding sparse, full sparse
CHANGES: dict[str, Any] = dict(num_experts=16, num_experts_per_tok=4, hidden_size=64)


@functools.cache
def tiny(dtype):
    """The model, and its parameters as float64."""
    model = tiny_inkling(dtype=dtype, num_mtp_layers=0, **CHANGES)
    leaves = zip(parameter_names(model), jax.tree.leaves(model), strict=True)
    return model, {name: np.asarray(leaf.astype(jnp.float32), np.float64) for name, leaf in leaves}


@jax.jit
def run(layer, h):
    step = Step.whole(1, TOKENS)
    return {"attention": layer.attn(h, step, None)[0], "mlp": layer.mlp(h), "layer": layer(h, step, None)[0]}


@functools.cache
def ours(dtype):
    """Each layer of the model and its two halves on random bfloat16 values: input and outputs by part."""
    model, _ = tiny(dtype)
    results = []
    for i in LAYERS:
        h = bf(np.random.default_rng(i).standard_normal((TOKENS, model.config.hidden_size)) * 1.5)
        out = run(model.layers[i], jnp.asarray(h[None], dtype))
        results.append((h, {part: np.asarray(x[0].astype(jnp.float32), np.float64) for part, x in out.items()}))
    return results


@functools.cache
def theirs(dtype, i, part, wrong=""):
    """What the oracle makes of the same input."""
    model, params = tiny(dtype)
    oracle, (h, _), name = Oracle(model.config, params, wrong, dtype == jnp.bfloat16), ours(dtype)[i], f"layers.{i}"
    if part == "attention":
        return oracle.attention(h, model.config.layer_types[i], name + ".attn")
    return oracle.mlp(h, name + ".mlp") if part == "mlp" else oracle.layer(h, model.config.layer_types[i], name)


def error(i, part, wrong=""):
    return relative(theirs(jnp.float32, i, part, wrong), ours(jnp.float32)[i][1][part])


def differing(i, part, wrong=""):
    """Share of bfloat16 output values that are not bit-equal to the oracle's, in all rows but the worst tenth.

    A sum inside the layer that falls on a rounding edge moves its whole row, and in which rows that happens differs
    from processor to processor (one with bfloat16 instructions sums in another order). A wrong rule moves every row.
    """
    rows = (theirs(jnp.bfloat16, i, part, wrong) != ours(jnp.bfloat16)[i][1][part]).mean(axis=-1)
    return float(np.sort(rows.reshape(-1))[: -(TOKENS // 10)].mean())


@pytest.mark.parametrize("part", ["attention", "mlp", "layer"])
@pytest.mark.parametrize("i", LAYERS)
def test_float32_layers_equal_the_oracle(i, part):
    assert error(i, part) < 2e-6


@pytest.mark.parametrize(
    "mistake, part, layers",
    [(mistake, "attention", LAYERS) for mistake in ATTENTION_MISTAKES]
    + [(mistake, "layer", LAYERS) for mistake in CONVOLUTION_MISTAKES]
    + [(mistake, "mlp", (0, 1)) for mistake in DENSE_MISTAKES]
    + [(mistake, "mlp", (2, 3)) for mistake in SPARSE_MISTAKES],
)
def test_each_wrong_rule_would_be_noticed(mistake, part, layers):
    assert max(error(i, part, mistake) for i in layers) > 1e-3


@pytest.mark.parametrize("part", ["attention", "mlp", "layer"])
@pytest.mark.parametrize("i", LAYERS)
def test_bfloat16_layers_equal_the_oracle_but_for_sums_that_fall_on_a_rounding_edge(i, part):
    # float32 against float64 sums move one value in a thousand; the mildest of the mistakes below moves 16%.
    assert differing(i, part) < 0.005


@pytest.mark.parametrize("mistake, where", ROUNDING_MISTAKES)
def test_each_wrong_rounding_would_be_noticed(mistake, where):
    layers = {"dense": (0, 1), "sparse": (2, 3)}.get(where, LAYERS)
    part = "mlp" if where in ("dense", "sparse") else where
    assert max(differing(i, part, mistake) for i in layers) > 0.1


MEDIA = {3: 0, 4: 1, 30: 2}  # position -> row


@functools.cache
def whole(dtype):
    """Tokens, tower outputs, and the model's logits."""
    model, _ = tiny(dtype)
    tokens = random_tokens(model, 1, TOKENS, seed=3)
    rows = bf(np.random.default_rng(4).standard_normal((len(MEDIA), model.config.hidden_size)))
    embeds, here = np.zeros((1, TOKENS, model.config.hidden_size), np.float32), np.zeros((1, TOKENS), bool)
    embeds[0, list(MEDIA)], here[0, list(MEDIA)] = rows, True
    media = MediaRows(jnp.asarray(embeds, dtype), jnp.asarray(here))
    return tokens[0], {at: rows[i] for at, i in MEDIA.items()}, definition(model, tokens, media)[0][0]


def model_error(dtype, wrong=""):
    (tokens, media, logits), (model, params) = whole(dtype), tiny(dtype)
    oracle = Oracle(model.config, params, wrong, dtype == jnp.bfloat16)
    return relative(oracle.logits(oracle.hidden(tokens, media)), logits)


def test_the_whole_float32_model_with_media_equals_the_oracle():
    assert model_error(jnp.float32) < 2e-6


def test_the_whole_bfloat16_model_is_nearer_the_oracle_than_the_truth():
    """The two round at the same points: what one rounding edge moves is far below what rounding costs."""
    (tokens, media, logits), (model, params) = whole(jnp.bfloat16), tiny(jnp.bfloat16)
    exact = Oracle(model.config, params, rounding=False)
    assert model_error(jnp.bfloat16) < 0.2 * relative(logits, exact.logits(exact.hidden(tokens, media)))


def test_the_cached_bfloat16_path_rounds_where_the_definition_does():
    model, params = tiny(jnp.bfloat16)
    tokens = random_tokens(model, 1, TOKENS, seed=3)
    logits = CachedInkling(model, 1, 64, max_chunk=16).in_chunks(tokens, [16] * 3)[0]
    errors = []
    for rounding in (True, False):
        oracle = Oracle(model.config, params, rounding=rounding)
        errors.append(relative(oracle.logits(oracle.hidden(tokens[0])), logits))
    assert errors[0] < 0.2 * errors[1]


@pytest.mark.parametrize("mistake", MODEL_MISTAKES)
def test_each_mistake_around_the_layers_would_be_noticed(mistake):
    assert model_error(jnp.float32, mistake) > 1e-3
