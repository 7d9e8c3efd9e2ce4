"""Logits to tokens, on the device, each row by its own rules.

Everything per row lives in `SamplingState`, so that one compiled step serves any mix of requests. A row's random
numbers depend on its own key and on how many tokens it has generated, never on the rows beside it.

The order is vLLM's: bias and penalties, temperature, min-p, top-k, top-p. Filters keep every token that ties with the
last one kept.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MAX_TOP_LOGPROBS = 20
# Below this a temperature would only overflow: the row is greedy.
GREEDY_TEMPERATURE = 1e-5


class SamplingState(NamedTuple):
    """Per-row sampling rules and history; rows are the engine's slots.

    Attributes:
        temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: [rows] float32.
        top_k: [rows] int32; 0 means no limit.
        key: [rows, 2] uint32, the request's threefry key.
        stop_ids: [rows, stops] int32, padded with -1.
        num_generated, min_tokens: [rows] int32; stop ids cannot be sampled while num_generated < min_tokens.
        bias: [rows, vocab] float32, added to the logits.
        in_prompt: [rows, vocab] bool. counts: [rows, vocab] int32, how often each token was generated.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    key: jax.Array
    stop_ids: jax.Array
    num_generated: jax.Array
    min_tokens: jax.Array
    bias: jax.Array
    in_prompt: jax.Array
    counts: jax.Array


class TopLogprobs(NamedTuple):
    """Log-probabilities of the model's own distribution: the chosen token's [rows] and the best ones' [rows, top]."""

    chosen: jax.Array
    top: jax.Array
    top_ids: jax.Array


def make_sampling_state(rows: int, vocab_size: int, num_stops: int) -> SamplingState:
    """Neutral, greedy rules for every row, so that idle rows cost a batch of greedy ones nothing."""
    zeros, ones = jnp.zeros(rows, jnp.float32), jnp.ones(rows, jnp.float32)
    counts = jnp.zeros(rows, jnp.int32)
    return SamplingState(
        temperature=zeros,
        top_k=counts,
        top_p=ones,
        min_p=zeros,
        repetition_penalty=ones,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        key=jnp.zeros((rows, 2), jnp.uint32),
        stop_ids=jnp.full((rows, num_stops), -1, jnp.int32),
        num_generated=counts,
        min_tokens=counts,
        bias=jnp.zeros((rows, vocab_size), jnp.float32),
        in_prompt=jnp.zeros((rows, vocab_size), bool),
        counts=jnp.zeros((rows, vocab_size), jnp.int32),
    )


def sample(logits: jax.Array, state: SamplingState) -> jax.Array:
    """Draws one token a row: logits [rows, vocab] float32 -> [rows] int32."""
    logits = adjust(logits, state)
    greedy = state.temperature < GREEDY_TEMPERATURE
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        scaled = logits - logits.max(-1, keepdims=True)
        scaled = scaled / jnp.where(greedy, 1.0, state.temperature)[:, None]
        kept = filter_logits(scaled, state.top_k, state.top_p, state.min_p)
        return jnp.argmax(kept + _gumbel(state, logits.shape[-1]), axis=-1).astype(jnp.int32)

    drawn = lax.cond(greedy.all(), lambda: best, draw)
    return jnp.where(greedy, best, drawn)


def adjust(logits: jax.Array, state: SamplingState) -> jax.Array:
    """Bias, penalties and the ban on stop ids before `min_tokens`; [rows, vocab] -> the same shape."""

    def penalised() -> jax.Array:
        seen = state.in_prompt | (state.counts > 0)
        penalty = jnp.where(seen, state.repetition_penalty[:, None], 1.0)
        out = logits + state.bias
        out = jnp.where(out > 0, out / penalty, out * penalty)
        out = out - state.frequency_penalty[:, None] * state.counts
        return out - state.presence_penalty[:, None] * (state.counts > 0)

    # Rows without penalties have neutral values, so the branch only saves the reads when no row needs them.
    plain = (
        (state.repetition_penalty == 1).all()
        & (state.frequency_penalty == 0).all()
        & (state.presence_penalty == 0).all()
        & (state.bias == 0).all()
    )
    logits = lax.cond(plain, lambda: logits, penalised)
    rows = jnp.arange(logits.shape[0])[:, None]
    too_early = (state.num_generated < state.min_tokens)[:, None] & (state.stop_ids >= 0)
    banned = jnp.where(too_early, state.stop_ids, logits.shape[-1])
    return logits.at[rows, banned].set(-jnp.inf, mode="drop")


def filter_logits(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Sets filtered logits to -inf.

    Args:
        scaled: [rows, vocab] logits over temperature, shifted so that each row's largest is 0.
        top_k: [rows], 0 for no limit. top_p: [rows] in (0, 1]. min_p: [rows] in [0, 1].
    """
    vocab = scaled.shape[-1]
    scaled = jnp.where(scaled >= jnp.log(min_p)[:, None], scaled, -jnp.inf)
    order = _ordered_bits(scaled)

    def apply_top_k() -> jax.Array:
        k = jnp.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
        threshold = _largest_threshold(order, jnp.ones_like(scaled), k.astype(jnp.float32))
        return jnp.where(order >= threshold[:, None], scaled, -jnp.inf)

    def apply_top_p() -> jax.Array:
        weights = jnp.exp(by_k)
        # Never nothing: the most likely token weighs 1, and a denormal product would be flushed to 0.
        wanted = jnp.maximum(top_p * weights.sum(-1), 1e-6)
        threshold = _largest_threshold(order, weights, wanted)
        return jnp.where((order >= threshold[:, None]) | (top_p >= 1)[:, None], by_k, -jnp.inf)

    by_k = lax.cond(((top_k <= 0) | (top_k >= vocab)).all(), lambda: scaled, apply_top_k)
    return lax.cond((top_p >= 1).all(), lambda: by_k, apply_top_p)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """float32 to uint32 such that the integers compare as the floats do."""
    bits = lax.bitcast_convert_type(x + 0.0, jnp.uint32)  # + 0.0 turns -0 into +0: they are equal
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(order: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest threshold [rows] at which the kept set `order >= threshold` still weighs `wanted` [rows].

    Found four bits at a time, in 8 passes over the vocabulary and without a sort, which a GPU does in one block a row.
    The passes are unrolled: a loop inside a conditional would keep the decode step out of a command buffer.
    """
    threshold = jnp.zeros(order.shape[0], jnp.uint32)
    digits = jnp.arange(1, 16, dtype=jnp.uint32)
    for shift in range(28, -1, -4):
        candidates = threshold[:, None] | digits << shift  # [rows, 15]
        kept = order[:, None, :] >= candidates[:, :, None]
        enough = jnp.where(kept, weights[:, None, :], 0.0).sum(-1) >= wanted[:, None]
        threshold = threshold | enough.sum(-1).astype(jnp.uint32) << shift
    return threshold


def _gumbel(state: SamplingState, vocab: int) -> jax.Array:
    def row(key_data: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data, impl="threefry2x32"), step)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    return jax.vmap(row)(state.key, state.num_generated)


def record(state: SamplingState, tokens: jax.Array, active: jax.Array) -> SamplingState:
    """Notes the sampled tokens [rows] of the active rows [rows]."""
    rows = jnp.arange(tokens.shape[0])
    added = active.astype(jnp.int32)
    return state._replace(counts=state.counts.at[rows, tokens].add(added), num_generated=state.num_generated + added)


def top_logprobs(logits: jax.Array, tokens: jax.Array) -> TopLogprobs:
    """Log-probabilities of `tokens` [rows] and of the MAX_TOP_LOGPROBS best: logits [rows, vocab] float32."""
    top, top_ids = lax.top_k(logits, min(MAX_TOP_LOGPROBS, logits.shape[-1]))
    norm = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return TopLogprobs(chosen - norm, top - norm[:, None], top_ids.astype(jnp.int32))
