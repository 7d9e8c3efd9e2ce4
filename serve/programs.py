"""The compiled programs of the engine: everything that runs on the device, compiled once at start.

A step takes the model's leaves (flattened once), the cache and the per-slot state, and gives the last two back in
the same memory: both are donated. Each program is compiled ahead of time for its few shapes and called as a compiled
object, which cannot compile anything later: a wrong shape is an error instead of a pause.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

from modeling.architecture import Model
from modeling.batch import Batch, MediaRows
from modeling.cache import Cache, CacheShape, PageTables, make_cache
from modeling.inkling.layer import Step
from modeling.inkling.media import BATCHES, in_batches, tower_output, tower_rows
from modeling.inkling.model import Inkling
from modeling.inkling.mtp import draft, prefill_depths, remember
from modeling.sampling import (
    MAX_TOP_LOGPROBS,
    SamplingState,
    TopLogprobs,
    make_sampling_state,
    record,
    sample,
    top_logprobs,
)
from serve.speculative import Verified, verify

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
    """What one decode call gave, on the host.

    Attributes:
        tokens: [places, slots], in order; with speculation several places a step.
        valid: [places, slots], which of them exist.
        logprobs: of the tokens, if wanted.
        steps: [steps, slots], tokens that each step gave a slot.
    """

    tokens: np.ndarray
    valid: np.ndarray
    logprobs: TopLogprobs
    steps: np.ndarray


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

    def __init__(self, model: Model, shapes: Shapes):
        self.config, self.dtype, self.shapes = model.config, model.dtype, shapes
        self._num_drafts = shapes.cache.num_drafts
        self._towers = tower_rows(model)
        self._leaves, self._treedef = jax.tree.flatten(model)
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._no_media: dict[int, MediaRows] = {}  # by chunk length
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
        sampling = make_sampling_state(slots, self.config.kept_vocab_size, self.shapes.num_stops)
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

    def _prefill_hidden(self, model: Model, cache: Cache, state: SlotState, slot, tokens, length, media):
        """tokens [chunk + drafts]: each drafting depth looks one token further than the one before."""
        chunk = tokens.shape[0] - self._num_drafts
        pages = jax.tree.map(lambda table: table[slot][None], state.pages)
        start = state.length[slot][None]
        here = jax.tree.map(lambda array: array[None, :chunk], media)
        batch = Batch(tokens[None, :chunk], start, length[None], pages, here)
        hidden, cache = model.forward(batch, cache)
        if self._num_drafts:
            assert isinstance(model, Inkling)
            embeds = model.embedded(tokens[None], jax.tree.map(lambda array: array[None], media))
            _, cache = prefill_depths(model, hidden, embeds, Step.of(batch), cache)
            cache = remember(cache, hidden, embeds[:, :chunk], pages.slot, start, batch.lengths)
        real = jnp.arange(chunk) < length
        seen = jnp.where(real, tokens[:chunk], self.config.vocab_size)
        in_prompt = state.sampling.in_prompt.at[slot, seen].set(True, mode="drop")
        state = state._replace(
            sampling=state.sampling._replace(in_prompt=in_prompt), length=state.length.at[slot].add(length)
        )
        return hidden[0], cache, state

    def _prefill(self, leaves, cache: Cache, state: SlotState, slot, tokens, length, is_last, media=None):
        """One chunk of one slot's prompt; after the last one the first token is sampled."""
        model = jax.tree.unflatten(self._treedef, leaves)
        hidden, cache, state = self._prefill_hidden(model, cache, state, slot, tokens, length, media)
        last = lax.dynamic_index_in_dim(hidden, length - 1, keepdims=True)
        logits = model.logits(last)  # [1, vocab]
        row = jax.tree.map(lambda leaf: leaf[slot][None], state.sampling)
        token = sample(logits, row)
        logprobs = top_logprobs(logits, token)
        slots = jnp.arange(self.shapes.num_slots)
        here = (slots == slot) & is_last
        state, goes_on = self._take(state, jnp.where(here, token[0], 0), here)
        state = state._replace(active=jnp.where(here, goes_on, state.active))
        return cache, state, token[0], jax.tree.map(lambda leaf: leaf[0], logprobs)

    def _prefill_scored(self, leaves, cache: Cache, state: SlotState, slot, tokens, length, targets, media=None):
        """One chunk whose log-probabilities of `targets` [chunk] (the tokens one further) are wanted too."""
        model = jax.tree.unflatten(self._treedef, leaves)
        hidden, cache, state = self._prefill_hidden(model, cache, state, slot, tokens, length, media)
        return cache, state, top_logprobs(model.logits(hidden), targets)

    def _take(self, state: SlotState, tokens: jax.Array, rows: jax.Array) -> tuple[SlotState, jax.Array]:
        """Takes the sampled `tokens` [slots] into the chosen `rows` [slots]; and whether a row then goes on."""
        state = state._replace(
            sampling=record(state.sampling, tokens, rows),
            last_token=jnp.where(rows, tokens, state.last_token),
            remaining=state.remaining - rows.astype(jnp.int32),
        )
        stopped = (state.sampling.stop_ids == state.last_token[:, None]).any(-1)
        return state, ~stopped & (state.remaining > 0)

    def _decode(self, leaves, cache: Cache, state: SlotState, num_steps, want_logprobs):
        """Up to `num_steps` steps for every active slot, without the host."""
        model = jax.tree.unflatten(self._treedef, leaves)
        slots, steps = self.shapes.num_slots, self.shapes.decode_steps
        num_top = min(MAX_TOP_LOGPROBS, self.config.kept_vocab_size)

        def no_logprobs() -> TopLogprobs:
            return TopLogprobs(jnp.zeros(slots), jnp.zeros((slots, num_top)), jnp.zeros((slots, num_top), jnp.int32))

        def choose(logits: jax.Array, state: SlotState) -> tuple[jax.Array, TopLogprobs]:
            tokens = sample(logits, state.sampling)
            return tokens, lax.cond(want_logprobs, lambda: top_logprobs(logits, tokens), no_logprobs)

        def take(state: SlotState, tokens: jax.Array, rows: jax.Array) -> tuple[SlotState, jax.Array]:
            state, goes_on = self._take(state._replace(length=state.length + rows), tokens, rows)
            return state._replace(active=jnp.where(rows, goes_on, state.active)), goes_on

        def goes_on(carry) -> jax.Array:
            step, _, state, _ = carry
            return (step < num_steps) & state.active.any()

        def body(carry):
            step, cache, state, out = carry
            drafts, cache = self._draft(model, cache, state)
            tokens = jnp.concatenate([state.last_token[:, None], drafts], axis=1)
            # Never past what a slot may still generate: beyond that it has no pages.
            lengths = jnp.where(state.active, jnp.minimum(tokens.shape[1], state.remaining), 0)
            hidden, cache = model.forward(Batch(tokens, state.length, lengths, state.pages), cache)
            if self._num_drafts:
                assert isinstance(model, Inkling)
                cache = remember(cache, hidden, model.embedded(tokens), state.pages.slot, state.length, lengths)
            state, news = verify(model.logits(hidden), drafts, state, state.active, choose, take)
            return step + 1, cache, state, jax.tree.map(lambda all_, new: all_.at[step].set(new), out, news)

        places = self._num_drafts + 1
        one_step = Verified(jnp.zeros(slots, jnp.int32), jnp.zeros(slots, bool), no_logprobs())
        out = jax.tree.map(lambda leaf: jnp.zeros((steps, places, *leaf.shape), leaf.dtype), one_step)
        _, cache, state, out = lax.while_loop(goes_on, body, (jnp.int32(0), cache, state, out))
        return cache, state, out

    def _draft(self, model: Model, cache: Cache, state: SlotState) -> tuple[jax.Array, Cache]:
        """Drafts after the newest tokens: [slots, drafts], and the updated cache."""
        if not self._num_drafts:
            return jnp.zeros((self.shapes.num_slots, 0), jnp.int32), cache
        assert isinstance(model, Inkling)
        return draft(model, state.last_token, state.length, state.active, state.pages, cache)

    def _tower(self, leaves, rows, *, kind: str):
        """One batch of pictures' or sound's rows as vectors of the text stream."""
        return tower_output(jax.tree.unflatten(self._treedef, leaves), kind, rows)

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
            arguments = (*core, slot, self._tokens(chunk), slot, flag, *self._media(chunk))
            jobs.append((f"prefill {chunk}", self._prefill, (1, 2), arguments))
        targets = np.zeros(SCORED_CHUNK, np.int32)
        arguments = (*core, slot, self._tokens(SCORED_CHUNK), slot, targets, *self._media(SCORED_CHUNK))
        jobs.append(("prefill scored", self._prefill_scored, (1, 2), arguments))
        for kind, shape in self._towers.items():
            for rows in BATCHES:
                dtype = np.float32 if kind == "image" else np.uint8
                tower = functools.partial(self._tower, kind=kind)
                jobs.append((f"{kind} {rows}", tower, (), (self._leaves, np.zeros((rows, *shape), dtype))))
        return jobs

    def _tokens(self, chunk: int) -> np.ndarray:
        return np.zeros(chunk + self._num_drafts, np.int32)

    def _media(self, chunk: int, media: MediaRows | None = None) -> tuple[MediaRows, ...]:
        """A prefill's last argument, no placeholders for None; none at all in a model without towers.

        One program a chunk length serves text and media; the rows of text, all zero, stay on the device.
        """
        if not self._towers:
            return ()
        if media is not None:
            return (media,)
        if chunk not in self._no_media:
            places = chunk + self._num_drafts
            embeds = jnp.zeros((places, self.config.hidden_size), self.dtype)
            self._no_media[chunk] = MediaRows(embeds, jnp.zeros(places, bool))
        return (self._no_media[chunk],)

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
            bias_ids=np.full(shapes.max_bias, self.config.kept_vocab_size, np.int32),
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

    def prefill(
        self, slot: int, tokens: np.ndarray, length: int, is_last: bool, media: MediaRows | None = None
    ) -> tuple[int, TopLogprobs] | None:
        """Runs `length` of a chunk's tokens; after the last chunk, the sampled token and its logprobs.

        Args:
            tokens: [chunk + drafts], the chunk and as many tokens more as the drafting depths look ahead, zeros where
                there are none. media: tower outputs for the placeholders among these, in host memory.
        """
        chunk = len(tokens) - self._num_drafts
        self.cache, self.state, token, logprobs = self._compiled[f"prefill {chunk}"](
            self._leaves,
            self.cache,
            self.state,
            np.int32(slot),
            tokens,
            np.int32(length),
            np.bool_(is_last),
            *self._media(chunk, media),
        )
        return (int(token), jax.device_get(logprobs)) if is_last else None

    def prefill_scored(
        self, slot: int, tokens: np.ndarray, length: int, targets: np.ndarray, media: MediaRows | None = None
    ) -> TopLogprobs:
        """As `prefill`, for SCORED_CHUNK tokens, and the log-probabilities of `targets` on the host."""
        self.cache, self.state, logprobs = self._compiled["prefill scored"](
            self._leaves,
            self.cache,
            self.state,
            np.int32(slot),
            tokens,
            np.int32(length),
            targets,
            *self._media(SCORED_CHUNK, media),
        )
        return jax.device_get(logprobs)

    def decode(self, num_steps: int, want_logprobs: bool) -> Sampled:
        """Up to `num_steps` steps for every active slot."""
        self.cache, self.state, out = self._compiled["decode"](
            self._leaves, self.cache, self.state, np.int32(num_steps), np.bool_(want_logprobs)
        )
        out: Verified = jax.device_get(out)  # [steps, places, slots] each
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out)
        return Sampled(flat.tokens, flat.valid, flat.logprobs, np.sum(out.valid, axis=1))

    def embed_media(self, kind: str, rows: np.ndarray) -> np.ndarray:
        """Tower outputs [n, hidden_size] of n rows, on the host."""
        return in_batches(rows, lambda part: self._compiled[f"{kind} {len(part)}"](self._leaves, part))

    def warm_up(self) -> None:
        """Runs each program once, so that the first request pays for no lazy initialisation."""
        self.admit(0, self.empty_admission())
        for chunk in self.shapes.prefill_chunks:
            self.prefill(0, self._tokens(chunk), 1, is_last=True)
        self.prefill_scored(0, self._tokens(SCORED_CHUNK), 1, np.zeros(SCORED_CHUNK, np.int32))
        for kind, shape in self._towers.items():
            for rows in BATCHES:
                self.embed_media(kind, np.zeros((rows, *shape), np.float32 if kind == "image" else np.uint8))
        self.decode(1, True)
        self.release(0)
        self.reset()
