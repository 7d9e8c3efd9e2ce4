"""The compiled programs of the engine: everything that runs on the device, compiled once at start.

A step takes the model's leaves (flattened once), the cache and the per-slot state, and gives the last two back in
the same memory: both are donated. Each program is compiled ahead of time for its few shapes and called as a compiled
object, which cannot compile anything later: a wrong shape is an error instead of a pause.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

from modeling.batch import Batch
from modeling.cache import Cache, CacheShape, PageTables, make_cache
from modeling.flint.model import Flint
from modeling.sampling import (
    MAX_TOP_LOGPROBS,
    SamplingState,
    TopLogprobs,
    make_sampling_state,
    record,
    sample,
    top_logprobs,
)

log = logging.getLogger(__name__)

# Chunk length of prompts whose log-probabilities are wanted: so many positions' logits are held at once.
SCORED_CHUNK = 32


class SlotState(NamedTuple):
    """What the device knows of each slot. Rows are slots.

    Attributes:
        sampling: rules and history.
        pages: where the slot's pages are; a number as large as the pool means none.
        last_token: [slots] int32, sampled and not yet in the cache.
        length: [slots] int32, tokens in the cache.
        remaining: [slots] int32, tokens that may still be generated.
        active: [slots] bool, whether the slot decodes.
    """

    sampling: SamplingState
    pages: PageTables
    last_token: jax.Array
    length: jax.Array
    remaining: jax.Array
    active: jax.Array


class Admission(NamedTuple):
    """One request's row of every field of `SamplingState`, and its pages. Bias is sparse, padded with id = vocab."""

    temperature: np.float32
    top_k: np.int32
    top_p: np.float32
    min_p: np.float32
    repetition_penalty: np.float32
    presence_penalty: np.float32
    frequency_penalty: np.float32
    key: np.ndarray
    stop_ids: np.ndarray
    min_tokens: np.int32
    bias_ids: np.ndarray
    bias_values: np.ndarray
    full_pages: np.ndarray
    window_pages: np.ndarray
    max_tokens: np.int32


class Sampled(NamedTuple):
    """Tokens sampled by one call, [slots, steps] each; `valid` tells which exist, `logprobs` are theirs if wanted."""

    tokens: jax.Array
    valid: jax.Array
    logprobs: TopLogprobs


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Static sizes of the programs.

    Attributes:
        prefill_chunks: chunk lengths in tokens, ascending; a prompt's rest takes the smallest that holds it.
        decode_steps: most tokens a decode call generates for each slot.
    """

    num_slots: int
    cache: CacheShape
    prefill_chunks: tuple[int, ...]
    decode_steps: int
    num_stops: int
    max_bias: int


class Programs:
    """Compiles the programs and owns the device state they work on. One thread may use it."""

    def __init__(self, model: Flint, shapes: Shapes):
        self.config, self.dtype, self.shapes = model.config, model.dtype, shapes
        self._leaves, self._treedef = jax.tree.flatten(model)
        self._compiled: dict[str, Callable[..., Any]] = {}
        self.cache: Cache | None = None
        self.state: SlotState | None = None
        self.reset()

    def free(self) -> None:
        """Gives the device memory of cache and state back."""
        for leaf in jax.tree.leaves((self.cache, self.state)):
            if not leaf.is_deleted():  # a step that raised took its donated buffers along
                leaf.delete()
        self.cache, self.state = None, None

    def reset(self) -> None:
        """Fresh, empty device state; also after a step that raised. The old is freed first: two would not fit."""
        self.free()
        self.cache = make_cache(self.config, self.shapes.cache, self.dtype)
        self.state = self._empty_state()

    def _empty_state(self) -> SlotState:
        slots, cache = self.shapes.num_slots, self.shapes.cache
        zeros = jnp.zeros(slots, jnp.int32)
        pages = PageTables(
            jnp.full((slots, cache.max_pages), cache.num_full_pages, jnp.int32),
            jnp.full((slots, cache.ring), cache.num_window_pages, jnp.int32),
            jnp.arange(slots, dtype=jnp.int32),
        )
        sampling = make_sampling_state(slots, self.config.vocab_size, self.shapes.num_stops)
        state = SlotState(sampling, pages, zeros, zeros, zeros, jnp.zeros(slots, bool))
        # Donation needs every leaf to be its own buffer; several fields start from one array above.
        return jax.tree.map(jnp.copy, state)

    # -- the programs as pure functions -------------------------------------------------------------------------

    def _admit(self, state: SlotState, slot: jax.Array, row: Admission) -> SlotState:
        sampling = state.sampling
        # In a fixed order: a program that differs from start to start is never found in the compilation cache.
        same = [name for name in SamplingState._fields if name in Admission._fields]
        fields = {name: getattr(sampling, name).at[slot].set(getattr(row, name)) for name in same}
        sampling = sampling._replace(
            **fields,
            num_generated=sampling.num_generated.at[slot].set(0),
            bias=sampling.bias.at[slot].set(0.0).at[slot, row.bias_ids].set(row.bias_values, mode="drop"),
            in_prompt=sampling.in_prompt.at[slot].set(False),
            counts=sampling.counts.at[slot].set(0),
        )
        return SlotState(
            sampling,
            PageTables(
                state.pages.full.at[slot].set(row.full_pages),
                state.pages.window.at[slot].set(row.window_pages),
                state.pages.slot,
            ),
            state.last_token.at[slot].set(0),
            state.length.at[slot].set(0),
            state.remaining.at[slot].set(row.max_tokens),
            state.active.at[slot].set(False),
        )

    def _prefill_hidden(self, model: Flint, cache: Cache, state: SlotState, slot, tokens, length):
        pages = jax.tree.map(lambda table: table[slot][None], state.pages)
        start = state.length[slot]
        hidden, cache = model.forward(Batch(tokens[None], start[None], length[None], pages), cache)
        real = jnp.arange(tokens.shape[0]) < length
        seen = jnp.where(real, tokens, self.config.vocab_size)
        in_prompt = state.sampling.in_prompt.at[slot, seen].set(True, mode="drop")
        state = state._replace(
            sampling=state.sampling._replace(in_prompt=in_prompt), length=state.length.at[slot].add(length)
        )
        return hidden[0], cache, state

    def _prefill(self, leaves, cache: Cache, state: SlotState, slot, tokens, length, is_last):
        """One chunk [chunk] of one slot's prompt; after the last one the first token is sampled."""
        model = jax.tree.unflatten(self._treedef, leaves)
        hidden, cache, state = self._prefill_hidden(model, cache, state, slot, tokens, length)
        last = lax.dynamic_index_in_dim(hidden, length - 1, keepdims=True)
        logits = model.logits(last)  # [1, vocab]
        row = jax.tree.map(lambda leaf: leaf[slot][None], state.sampling)
        token = sample(logits, row)
        logprobs = top_logprobs(logits, token)
        slots = jnp.arange(self.shapes.num_slots)
        here = (slots == slot) & is_last
        state = self._advance(state, jnp.where(here, token[0], 0), here)
        state = state._replace(active=jnp.where(here, self._goes_on(state), state.active))
        return cache, state, token[0], jax.tree.map(lambda leaf: leaf[0], logprobs)

    def _prefill_scored(self, leaves, cache: Cache, state: SlotState, slot, tokens, length, targets):
        """One chunk whose log-probabilities of `targets` (the tokens one further) are wanted too: [chunk] each."""
        model = jax.tree.unflatten(self._treedef, leaves)
        hidden, cache, state = self._prefill_hidden(model, cache, state, slot, tokens, length)

        return cache, state, top_logprobs(model.logits(hidden), targets)

    def _advance(self, state: SlotState, tokens: jax.Array, rows: jax.Array) -> SlotState:
        """Takes the sampled `tokens` [slots] into the chosen `rows` [slots]."""
        return state._replace(
            sampling=record(state.sampling, tokens, rows),
            last_token=jnp.where(rows, tokens, state.last_token),
            remaining=state.remaining - rows.astype(jnp.int32),
        )

    def _goes_on(self, state: SlotState) -> jax.Array:
        stopped = (state.sampling.stop_ids == state.last_token[:, None]).any(-1)
        return ~stopped & (state.remaining > 0)

    def _decode(self, leaves, cache: Cache, state: SlotState, num_steps, want_logprobs):
        """Up to `num_steps` tokens for every active slot, without the host."""
        model = jax.tree.unflatten(self._treedef, leaves)
        slots, steps = self.shapes.num_slots, self.shapes.decode_steps
        num_top = min(MAX_TOP_LOGPROBS, self.config.vocab_size)

        def no_logprobs() -> TopLogprobs:
            return TopLogprobs(jnp.zeros(slots), jnp.zeros((slots, num_top)), jnp.zeros((slots, num_top), jnp.int32))

        out = Sampled(
            jnp.zeros((steps, slots), jnp.int32),
            jnp.zeros((steps, slots), bool),
            jax.tree.map(lambda leaf: jnp.zeros((steps, *leaf.shape), leaf.dtype), no_logprobs()),
        )

        def goes_on(carry) -> jax.Array:
            step, _, state, _ = carry
            return (step < num_steps) & state.active.any()

        def body(carry):
            step, cache, state, out = carry
            active = state.active
            batch = Batch(state.last_token[:, None], state.length, active.astype(jnp.int32), state.pages)
            hidden, cache = model.forward(batch, cache)
            logits = model.logits(hidden[:, 0])
            tokens = jnp.where(active, sample(logits, state.sampling), 0)
            logprobs = lax.cond(want_logprobs, lambda: top_logprobs(logits, tokens), no_logprobs)
            state = self._advance(state._replace(length=state.length + active), tokens, active)
            state = state._replace(active=active & self._goes_on(state))
            news = Sampled(tokens, active, logprobs)
            return step + 1, cache, state, jax.tree.map(lambda all_, new: all_.at[step].set(new), out, news)

        _, cache, state, out = lax.while_loop(goes_on, body, (jnp.int32(0), cache, state, out))
        return cache, state, out

    # -- compiling and calling ------------------------------------------------------------------------------------

    def compile(self, progress: bool = True) -> None:
        """Compiles every program and runs none; a bar shows which."""
        started = time.monotonic()
        jobs = self._jobs()
        with tqdm(jobs, desc="compiling", unit="program", disable=not progress) as bar:
            for name, function, donated, arguments in bar:
                bar.set_postfix_str(name)
                lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
                self._compiled[name] = lowered.compile()
        log.info("compiled %d programs in %.1f s", len(jobs), time.monotonic() - started)

    def _jobs(self) -> list[tuple[str, Callable, tuple[int, ...], tuple]]:
        slot, flag = np.int32(0), np.bool_(False)
        core = (self._leaves, self.cache, self.state)
        jobs: list[tuple[str, Callable, tuple[int, ...], tuple]] = [
            ("admit", self._admit, (0,), (self.state, slot, self.empty_admission())),
            ("decode", self._decode, (1, 2), (*core, np.int32(1), flag)),
        ]
        for chunk in self.shapes.prefill_chunks:
            tokens = np.zeros(chunk, np.int32)
            jobs.append((f"prefill {chunk}", self._prefill, (1, 2), (*core, slot, tokens, slot, flag)))
        tokens = np.zeros(SCORED_CHUNK, np.int32)
        jobs.append(("prefill scored", self._prefill_scored, (1, 2), (*core, slot, tokens, slot, tokens)))
        return jobs

    def empty_admission(self) -> Admission:
        """An admission of neutral, greedy values and no pages, for the caller to `_replace`."""
        cache, shapes = self.shapes.cache, self.shapes
        one, zero, none = np.float32(1), np.float32(0), np.int32(0)
        return Admission(
            temperature=zero,
            top_k=none,
            top_p=one,
            min_p=zero,
            repetition_penalty=one,
            presence_penalty=zero,
            frequency_penalty=zero,
            key=np.zeros(2, np.uint32),
            stop_ids=np.full(shapes.num_stops, -1, np.int32),
            min_tokens=none,
            bias_ids=np.full(shapes.max_bias, self.config.vocab_size, np.int32),
            bias_values=np.zeros(shapes.max_bias, np.float32),
            full_pages=np.full(cache.max_pages, cache.num_full_pages, np.int32),
            window_pages=np.full(cache.ring, cache.num_window_pages, np.int32),
            max_tokens=none,
        )

    def admit(self, slot: int, row: Admission) -> None:
        """Gives a slot to a request."""
        self.state = self._compiled["admit"](self.state, np.int32(slot), row)

    def release(self, slot: int) -> None:
        """Takes a slot back: neutral, greedy and without pages, so nothing more is written to the ones it had."""
        self.admit(slot, self.empty_admission())

    def prefill(self, slot: int, tokens: np.ndarray, length: int, is_last: bool) -> tuple[int, TopLogprobs] | None:
        """Runs `length` of the padded `tokens` [chunk]; after the last chunk, the sampled token and its logprobs."""
        program = self._compiled[f"prefill {len(tokens)}"]
        self.cache, self.state, token, logprobs = program(
            self._leaves, self.cache, self.state, np.int32(slot), tokens, np.int32(length), np.bool_(is_last)
        )
        return (int(token), jax.device_get(logprobs)) if is_last else None

    def prefill_scored(self, slot: int, tokens: np.ndarray, length: int, targets: np.ndarray) -> TopLogprobs:
        """As `prefill`, for SCORED_CHUNK tokens, and the log-probabilities of `targets` on the host."""
        self.cache, self.state, logprobs = self._compiled["prefill scored"](
            self._leaves, self.cache, self.state, np.int32(slot), tokens, np.int32(length), targets
        )
        return jax.device_get(logprobs)

    def decode(self, num_steps: int, want_logprobs: bool) -> Sampled:
        """Up to `num_steps` tokens for every active slot, on the host, [steps, slots]."""
        self.cache, self.state, out = self._compiled["decode"](
            self._leaves, self.cache, self.state, np.int32(num_steps), np.bool_(want_logprobs)
        )
        return jax.device_get(out)
