"""Inkling's parts by the faults that others met: scaling by position, scores, routing, head, convolution, padding."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inkling_oracle import Oracle, bf, sigmoid
from tiny import relative
from tiny_inkling import CachedInkling, random_tokens, tiny_inkling, tiny_inkling_config

from modeling.batch import MediaRows
from modeling.inkling.config import FULL, SLIDING
from modeling.inkling.layer import Attention, Step, log_scale
from modeling.layers.moe import SinkMoE
from modeling.layers.sconv import ShortConv
from modeling.parameters import parameter_names, random_parameters


def filled(make: Any, seed=0) -> Any:
    """A module with random parameters."""
    return random_parameters(nnx.eval_shape(make), seed)


def parameters(module, prefix="") -> dict[str, np.ndarray]:
    leaves = zip(parameter_names(module), jax.tree.leaves(module), strict=True)
    return {prefix + name: np.asarray(leaf.astype(jnp.float32), np.float64) for name, leaf in leaves}


def values(*shape, seed=0) -> np.ndarray:
    """Random bfloat16 values in float32."""
    return bf(np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


# Attention


@functools.cache
def attended(kind: str, floor: int | None, first: int = 0, tokens: int = 12) -> np.ndarray:
    """The attention's output on tokens from position `first` on."""
    config = tiny_inkling_config(log_scaling_n_floor=floor)
    attention = filled(lambda: Attention(config, kind))
    step = Step(first + jnp.arange(tokens)[None])
    run = jax.jit(lambda attention, x, step: attention(x, step, None)[0])
    out: Any = run(attention, values(1, tokens, config.hidden_size), step)
    return np.asarray(out[0])


def test_at09_full_layers_alone_scale_by_position():
    np.testing.assert_array_equal(attended(SLIDING, 4), attended(SLIDING, None))
    scaled, plain = attended(FULL, 4), attended(FULL, None)
    np.testing.assert_array_equal(scaled[:4], plain[:4])
    assert (scaled[4:] != plain[4:]).any(axis=-1).all()


def scaling_error(floor: int | None, mistake: str = "") -> float:
    config = tiny_inkling_config(log_scaling_n_floor=floor)
    params = parameters(filled(lambda: Attention(config, FULL)), "attn.")
    x = values(12, config.hidden_size).astype(np.float64)
    return relative(Oracle(config, params, mistake, rounding=False).attention(x, FULL, "attn"), attended(FULL, floor))


def test_at09_query_and_bias_are_both_scaled_or_neither():
    assert scaling_error(4) < 2e-6
    assert scaling_error(None) < 2e-6
    for mistake in ("no tau", "tau on the query alone", "tau on the bias alone", "tau of t instead of t + 1"):
        assert scaling_error(4, mistake) > 1e-3


def test_at09_factor():
    tau = log_scale(jnp.arange(12), 4, 0.1)
    assert tau.dtype == jnp.float32
    np.testing.assert_array_equal(tau[:4], 1)
    np.testing.assert_allclose(tau[4:], 1 + 0.1 * np.log(np.arange(5, 13) / 4), rtol=1e-7)
    np.testing.assert_array_equal(log_scale(jnp.arange(12), None, 0.1), 1)


def test_at09_published_floor():
    tau = np.asarray(log_scale(jnp.array([127_999, 128_000, 262_143, 524_287, 1_048_575]), 128_000, 0.1))
    assert tau[0] == 1 < tau[1]
    np.testing.assert_allclose(tau[1], 1 + 0.1 / 128_000, rtol=1e-7)
    np.testing.assert_allclose(tau[2:], [1.0717, 1.1410, 1.2103], atol=5e-5)
    scaled, plain = (attended(FULL, floor, first=127_999, tokens=2) for floor in (128_000, None))
    np.testing.assert_array_equal(scaled[0], plain[0])
    assert (scaled[1] != plain[1]).any()


@pytest.mark.parametrize("kind", [FULL, SLIDING])
def test_at11_scale_is_1_over_128_with_normed_query_and_convolved_then_normed_key(kind):
    config = tiny_inkling_config(head_dim=128, swa_head_dim=128)
    attention, x = filled(lambda: Attention(config, kind)), values(1, 30, config.hidden_size)
    run = jax.jit(lambda attention: attention(x, Step.whole(1, 30), None)[0][0])
    out, params = run(attention), parameters(attention, "attn.")
    right, *wrong = (
        relative(Oracle(config, params, mistake, rounding=False).attention(np.float64(x[0]), kind, "attn"), out)
        for mistake in ("", "scale of 1 / sqrt(d)", "key normed before its convolution", "value normed")
    )
    assert right < 2e-6
    assert min(wrong) > 1e-3
    # Norms make the sizes of query and key irrelevant, but not the value's.
    for name, factor in (("q_proj", 1), ("k_proj", 1), ("v_proj", 4)):
        larger = filled(lambda: Attention(config, kind))
        projection = getattr(larger, name)
        projection.weight = nnx.Param(projection.weight[...] * 4)
        assert relative(run(larger), factor * out) < 1e-5


# Routing


def routed(hidden=32, experts=16, k=6, shared=2, expert_format="bf16", seed=0) -> SinkMoE:
    return filled(lambda: SinkMoE(hidden, experts, k, shared, 32, 2.5, expert_format), seed)


def test_mo04_bias_moves_the_selection_and_nothing_else():
    block, x = routed(), values(40, 32)
    block.gate_bias = nnx.Param(jnp.zeros(16).at[11].set(5.0))
    weights, ids, shared = (np.asarray(y) for y in block.route(jnp.asarray(x)))
    assert (ids[:, 0] == 11).all()
    scores = sigmoid(x @ np.asarray(block.gate[...], np.float64).T)
    active = np.concatenate([np.take_along_axis(scores, ids, 1), scores[:, 16:]], 1)
    expected = active / active.sum(1, keepdims=True) * 2.5 * float(block.gate_scale[0])
    np.testing.assert_allclose(np.concatenate([weights, shared], 1), expected, rtol=1e-5)
    assert (np.argsort(-scores[:, :16], 1)[:, :6] == 11).any(1).mean() < 0.9  # it would not always have been chosen


@pytest.mark.parametrize("strength", [1, 100])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_mo05_all_weights_sum_to_the_two_scales(dtype, strength):
    """Also where every sigmoid underflows, as only log-sigmoids survive."""
    block, x = routed(), jnp.asarray(np.abs(values(40, 32)), dtype)
    block.gate = nnx.Param(-strength * jnp.abs(block.gate[...]))
    weights, _, shared = block.route(x)
    assert weights.dtype == shared.dtype == jnp.float32
    assert weights.shape == (40, 6)
    assert shared.shape == (40, 2)
    total = np.asarray(weights.sum(1) + shared.sum(1))
    np.testing.assert_allclose(total, 2.5 * float(block.gate_scale[0]), rtol=1e-6)


@pytest.mark.parametrize("expert", [0, 1])
def test_mo05_each_shared_expert_has_its_own_weight(expert):
    """With the other shared expert and all routed ones silenced, the output is this one's share."""
    block, x = routed(), values(10, 32)
    block.experts.down_proj.weight = nnx.Param(jnp.zeros_like(block.experts.down_proj.weight[...]))
    downs = block.shared_experts.down_proj.weight
    block.shared_experts.down_proj.weight = nnx.Param(downs[...].at[1 - expert].set(0))
    gate, up, down = (
        np.asarray(getattr(block.shared_experts, f"{name}_proj").weight[...][expert], np.float64)
        for name in ("gate", "up", "down")
    )
    _, _, shared = block.route(jnp.asarray(x))
    g = x @ gate.T
    expected = np.asarray(shared)[:, [expert]] * ((g * sigmoid(g) * (x @ up.T)) @ down.T)
    assert relative(block(jnp.asarray(x)), expected) < 1e-6


def test_mo02_lowest_index_wins_among_equals():
    block = routed(k=3)
    gate = np.asarray(block.gate[...]).copy()
    gate[[2, 5, 9]] = gate[5] = 3 * np.abs(gate).max()
    block.gate, block.gate_bias = nnx.Param(jnp.asarray(gate)), nnx.Param(jnp.zeros(16).at[12].set(5.0))
    _, ids, _ = block.route(jnp.abs(jnp.asarray(values(5, 32))))
    assert ids.tolist() == [[12, 2, 5]] * 5


def test_logits_are_not_rounded_before_the_selection():
    """Two logits less than a bfloat16 step apart, of bfloat16 inputs."""
    block = routed(k=1)
    gate = jnp.zeros((18, 32)).at[4, 0].set(1.0).at[9, :2].set(jnp.array([1.0, 2**-9]))
    block.gate, block.gate_bias = nnx.Param(gate.astype(jnp.bfloat16)), nnx.Param(jnp.zeros(16))
    _, ids, _ = block.route(jnp.zeros((1, 32), jnp.bfloat16).at[0, :2].set(1))
    assert int(ids[0, 0]) == 9


@pytest.mark.parametrize("tokens", [3, 101])
@pytest.mark.parametrize("expert_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ways_to_run_experts_agree_whatever_is_padding(dtype, expert_format, tokens):
    """Few tokens are gathered and many grouped; padding holds NaN and changes nothing."""
    block, rng = routed(expert_format=expert_format), np.random.default_rng(tokens)
    x, valid = values(tokens, 32, seed=tokens), rng.random(tokens) < 0.7
    valid[rng.integers(tokens)] = True
    expected = np.asarray(jax.jit(lambda block, x: block(x))(block, jnp.asarray(x, dtype)), np.float64)
    poisoned = jnp.asarray(np.where(valid[:, None], x, np.nan), dtype)
    got = np.asarray(jax.jit(lambda block, x, valid: block(x, valid))(block, poisoned, valid), np.float64)
    # In bfloat16 the order of a float32 sum moves a rounding by one step now and then.
    assert relative(got[valid], expected[valid]) < (1e-6 if dtype == jnp.float32 else 2e-3)


# The head


def test_mo07_padded_rows_of_the_head_are_cut_off():
    model = tiny_inkling(num_mtp_layers=0)
    hidden, kept = jnp.asarray(values(2, 5, 32)), model.config.kept_vocab_size
    logits = model.logits(hidden)
    assert logits.shape == (2, 5, kept)
    for padding in (1e30, np.nan):
        model.unembed.weight = nnx.Param(model.unembed.weight[...].at[kept:].set(padding))
        np.testing.assert_array_equal(model.logits(hidden), logits)


def test_mo07_width_multiplier_divides_the_float32_logits():
    """24 is no power of two: neither hidden states nor weights may be rounded after the division."""
    model = tiny_inkling(dtype=jnp.bfloat16, num_mtp_layers=0, logits_mup_width_multiplier=24.0)
    hidden, unembed = values(5, 32), np.asarray(model.unembed.weight[...], np.float64)[: model.config.kept_vocab_size]
    logits = model.logits(jnp.asarray(hidden, jnp.bfloat16))
    assert logits.dtype == jnp.float32
    assert relative(logits, hidden @ unembed.T / 24) < 1e-6
    assert relative(logits, bf(hidden / 24) @ unembed.T) > 1e-4


# The convolution


def convolved(x, weight):
    """Unrounded: x [tokens, channels], weight [channels, taps] -> [tokens, channels]."""
    taps = weight.shape[1]
    return x + [
        sum(weight[:, i] * x[t + 1 - taps + i] for i in range(taps) if t + 1 - taps + i >= 0) for t in range(len(x))
    ]


@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("weight_dtype", [jnp.bfloat16, jnp.float32])
def test_sc06_convolution_is_in_float32_with_its_residual_and_one_rounding(weight_dtype, taps):
    """Weights that are float32 on disk stay so."""
    x, weight = values(50, 64), np.random.default_rng(1).standard_normal((64, taps)).astype(np.float32) * 0.4
    conv = ShortConv(64, taps)
    conv.weight = nnx.Param(jnp.asarray(weight, weight_dtype))
    got = np.asarray(conv.start(jnp.asarray(x[None], jnp.bfloat16))[0], np.float64)
    weight = np.asarray(conv.weight[...].astype(jnp.float32), np.float64)
    x = np.float64(x)
    assert (got != bf(convolved(x, weight))).mean() < 0.002
    assert (got != bf(x + bf(convolved(x, weight) - x))).mean() > 0.1
    if weight_dtype == jnp.float32:
        assert (got != bf(convolved(x, bf(weight)))).mean() > 0.05


def test_sc06_token_by_token_is_bit_equal_to_one_pass():
    """The state is the raw inputs, which bfloat16 holds exactly."""
    conv, x = filled(lambda: ShortConv(64, 4)), jnp.asarray(values(2, 20, 64), jnp.bfloat16)
    step = jax.jit(conv.cached)
    ring, out = jnp.full((2, 4, 64), jnp.nan, jnp.bfloat16), []
    for t in range(20):
        y, ring = step(x[:, t : t + 1], ring, jnp.array([1, 0]), jnp.full(2, t), jnp.ones(2, jnp.int32))
        out.append(y)
    np.testing.assert_array_equal(jnp.concatenate(out, 1), conv.start(x))


# Padding


@pytest.mark.parametrize("lengths", [(5, 12, 1), (12, 0, 7)])
def test_nan_in_padding_never_reaches_real_rows(lengths):
    """Not in the chunk at hand, nor in the next, which reads what this one left in pages and rings."""
    model = tiny_inkling(num_hidden_layers=2, layer_types=(SLIDING, FULL), sparse_layers=(True, True), num_mtp_layers=0)
    tokens = random_tokens(model, 3, 24)
    oracle = Oracle(model.config, parameters(model), rounding=False)
    truth = [oracle.logits(oracle.hidden(row)) for row in tokens]
    cached = CachedInkling(model, 3, 64, max_chunk=12)
    padding = jnp.asarray(np.arange(12) >= np.array(lengths)[:, None])
    nan = MediaRows(jnp.full((3, 12, model.config.hidden_size), jnp.nan), padding)
    first = cached(tokens[:, :12], lengths, media=nan)
    nothing = MediaRows(nan.embeds, jnp.zeros_like(padding))
    second = cached(np.stack([tokens[row, n : n + 12] for row, n in enumerate(lengths)]), media=nothing)
    for row, n in enumerate(lengths):
        assert np.isnan(first[row, n:]).all()
        assert relative(np.concatenate([first[row, :n], second[row]]), truth[row][: n + 12]) < 1e-5
