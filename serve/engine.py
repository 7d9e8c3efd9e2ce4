"""The engine: token ids in, token ids out. Knows requests, slots and pages; knows nothing about text.

One thread owns JAX and everything in `Programs` and `Scheduler`. Other threads hand it submissions and aborts through
an inbox and are called back with `Output`s.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import jax
import numpy as np

from modeling.architecture import Model
from modeling.batch import MediaRows
from modeling.kernels import choose_kernels, with_kernels
from modeling.sampling import TopLogprobs
from serve.admission import admission
from serve.capacity import cache_shape
from serve.collector import Collector
from serve.engine_media import TowerCache, media_rows, placeholders
from serve.logprobs import token_logprob
from serve.programs import SCORED_CHUNK, Programs, Sampled, Shapes
from serve.request import (
    MAX_STOP_TOKENS,
    Completion,
    EngineBusy,
    EngineClosed,
    EngineStats,
    InvalidRequest,
    Output,
    Request,
)
from serve.request import SamplingParams as SamplingParams
from serve.scheduler import Scheduler, Sequence
from serve.speculative import num_draft_tokens
from serve.validate import MAX_LOGIT_BIAS, check_media, check_request

log = logging.getLogger(__name__)

# A long chunk spreads the cost of visiting every expert; a short one keeps short prompts and the other slots quick.
CPU_CHUNKS, ACCELERATOR_CHUNKS = (64, 512), (128, 2048)
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What an operator may choose.

    Attributes:
        max_model_len: tokens a sequence may have, prompt and output; None means the model's own limit.
        num_slots: sequences that decode together.
        cache_bytes: device memory for the KV cache; None means enough for every slot at full length on a CPU (at most
            4 GiB), and what the device has left on an accelerator.
        prefill_chunks: compiled chunk lengths in tokens, ascending; None takes `CPU_CHUNKS` or `ACCELERATOR_CHUNKS`.
        decode_steps: tokens generated between two visits to the host.
        max_queue: requests that may wait for a slot.
        num_draft_tokens: tokens drafted and checked a step, at most the model's drafting depths; 0 switches speculation
            off, None drafts `serve.speculative.DRAFT_TOKENS` or as many as the model can.
        media_cache_bytes: host memory for tower outputs of pictures and clips seen before.
        kernels: how decode steps run: "pallas" (fused kernels), "plain" (XLA), or "auto", the kernels where they can.
        progress: show a bar while compiling.
    """

    max_model_len: int | None = None
    num_slots: int = 8
    cache_bytes: int | None = None
    prefill_chunks: tuple[int, ...] | None = None
    decode_steps: int = 8
    max_queue: int = 1024
    num_draft_tokens: int | None = None
    media_cache_bytes: int = 256 << 20
    kernels: str = "auto"
    progress: bool = True


class Engine:
    """Serves one model. `start` it, `submit` or `generate`, and `close` it.

    Attributes:
        max_model_len: prompt + output tokens a sequence may have.
        vocab_size: token ids are 0 .. vocab_size - 1.
        num_draft_tokens: tokens drafted a step; 0 without speculation.
        eos_token_ids: end tokens, unless a request ignores them.
        compiles_since_ready: programs XLA has compiled since `start` returned; stays 0.
        drafts_total: decode steps of a request that checked drafts.
        observer: called with every output on the engine's thread, before the request's own reader; must not block.
            None, or for example `serve.metrics.Metrics.record`.
        is_alive: False once the engine's thread has died of a fault it could not recover from.
    """

    def __init__(self, model: Model, config: EngineConfig = EngineConfig(), eos_token_ids: Iterable[int] = ()):
        limit = model.config.max_position_embeddings
        self.max_model_len = limit if config.max_model_len is None else min(config.max_model_len, limit)
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, a prompt and an answer, not {config.max_model_len}")
        self.vocab_size = model.config.kept_vocab_size
        self.num_draft_tokens = num_draft_tokens(model, config.num_draft_tokens)
        self.eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *model.config.eos_token_ids)))
        if strange := [i for i in self.eos_token_ids if not 0 <= i < self.vocab_size]:
            raise ValueError(f"end token ids {strange} are outside the vocabulary 0..{self.vocab_size - 1}")
        if len(self.eos_token_ids) > MAX_STOP_TOKENS:
            raise ValueError(f"{len(self.eos_token_ids)} end tokens; at most {MAX_STOP_TOKENS} are supported")
        if any(len(leaf.sharding.device_set) > 1 for leaf in jax.tree.leaves(model)):
            raise ValueError("the engine runs on one device; load the model without a mesh (modeling.score takes one)")
        [device] = jax.tree.leaves(model)[0].devices()
        model = with_kernels(model, choose_kernels(model, config.kernels, config.num_slots, device))
        self.config = config
        self._chunks = config.prefill_chunks or (CPU_CHUNKS if jax.default_backend() == "cpu" else ACCELERATOR_CHUNKS)
        slots, chunk = config.num_slots, max(self._chunks)
        cache = cache_shape(model, slots, self.max_model_len, chunk, self.num_draft_tokens, config.cache_bytes)
        shapes = Shapes(
            num_slots=slots,
            cache=cache,
            prefill_chunks=self._chunks,
            decode_steps=config.decode_steps,
            num_stops=MAX_STOP_TOKENS,
            max_bias=MAX_LOGIT_BIAS,
        )
        self._programs = Programs(model, shapes)
        self._placeholders = placeholders(model)
        self._towers = TowerCache(self._programs.embed_media, config.media_cache_bytes)
        self._scheduler = Scheduler(config.num_slots, shapes.cache)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._known: set[str] = set()  # ids submitted and not finished; guarded by the lock
        self._lock = threading.Lock()
        self._accepting = self._stopping = False
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._prompt_tokens_total = self._generation_tokens_total = 0
        self._draft_tokens_total = self._accepted_tokens_total = self.drafts_total = 0
        self.observer: Callable[[Sequence, Output], None] | None = None
        self.compiles_since_ready = 0
        self.is_alive = True

    # -- called from any thread -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Compiles everything, then starts the engine thread. Returns when requests can be served at full speed.

        Raises:
            RuntimeError: it has been started before; make another engine.
        """
        if self._thread is not None or self._stopping:
            raise RuntimeError("an engine starts once; make another one")
        self._programs.compile(self.config.progress)
        self._programs.warm_up()
        jax.monitoring.register_event_duration_secs_listener(self._count_compile)
        self._accepting = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        """Queues a request and returns at once.

        `on_output` is called on the engine's thread, in order, and must not block; its last call has a
        `finish_reason`.

        Raises:
            InvalidRequest: it can never be served; says what to change.
            EngineBusy: the queue is full.
            EngineClosed: the engine has not started, is draining, or has stopped.
        """
        sequence = Sequence(request, on_output, self._check(request))
        with self._lock:
            if not self._accepting:
                raise EngineClosed("the engine is not accepting requests; try another server or later")
            if request.request_id in self._known:
                raise InvalidRequest(f"request_id {request.request_id!r} is already in use; choose another")
            if len(self._known) >= self.config.max_queue + self.config.num_slots:
                raise EngineBusy(f"{len(self._known)} requests are already queued; try again later")
            self._known.add(request.request_id)
            self._idle.clear()
            self._inbox.put(lambda: self._scheduler.waiting.append(sequence))

    def _check(self, request: Request) -> int:
        """How many tokens the request may generate; raises InvalidRequest where it can never be served."""
        check_media(request, self._placeholders)
        placeholder_ids = [place.token_id for place in self._placeholders.values()]
        max_tokens = check_request(
            request, self.max_model_len, self.vocab_size, len(self.eos_token_ids), placeholder_ids
        )
        full, _ = self._scheduler.pages_needed(len(request.prompt_token_ids) + max_tokens - 1)
        if full > self._scheduler.full_pool.num_pages:
            raise InvalidRequest(
                f"the request may grow to {len(request.prompt_token_ids) + max_tokens} tokens, more than the whole "
                f"cache holds ({self._scheduler.full_pool.num_pages} pages of 64); shorten it or lower max_tokens"
            )
        return max_tokens

    def abort(self, request_id: str, reason: Literal["abort", "stop"] = "abort") -> bool:
        """Ends a request; a final `Output` follows. False if the id is not in the engine.

        `reason` is its `finish_reason`: "abort", or "stop" where the caller has found a stop string.
        """
        with self._lock:
            if request_id not in self._known:
                return False
            self._inbox.put(lambda: self._abort(request_id, reason))
            return True

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Runs requests and yields each as it completes, not in order: match them by `request_id`.

        Closing the iterator early aborts what is left.

        Raises:
            InvalidRequest: one of them can never be served; none has been started then.
        """
        done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        waiting = collections.deque(requests)
        for request in waiting:
            self._check(request)
        in_flight: set[str] = set()
        try:
            while waiting or in_flight:
                try:
                    while waiting:
                        self.submit(waiting[0], Collector(done.put))
                        in_flight.add(waiting.popleft().request_id)
                except EngineBusy:
                    if not in_flight:  # other users fill the queue
                        time.sleep(0.05)
                        continue
                completion = done.get()
                in_flight.discard(completion.request_id)
                yield completion
        finally:
            for request_id in in_flight:
                self.abort(request_id)

    def stats(self) -> EngineStats:
        """Counts as of now; safe from any thread, and never in the engine's way: it takes no lock."""
        scheduler = self._scheduler
        known, running = len(self._known), len(scheduler.running)
        return EngineStats(
            num_running=running,
            num_waiting=max(0, known - running),
            num_slots=self.config.num_slots,
            kv_pages_used=scheduler.full_pool.num_used,
            kv_pages_total=scheduler.full_pool.num_pages,
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            draft_tokens_total=self._draft_tokens_total,
            accepted_tokens_total=self._accepted_tokens_total,
        )

    def drain(self, timeout_s: float) -> None:
        """Takes no new requests, waits for the others up to `timeout_s`, then aborts what is left."""
        with self._lock:
            self._accepting = False
        if self._thread is None or self._idle.wait(timeout_s):
            return
        with self._lock:
            left = list(self._known)
        for request_id in left:
            self.abort(request_id)
        self._idle.wait(timeout=30)

    def close(self) -> None:
        """Aborts what runs, stops the thread and frees the device memory of cache and state. Safe to call twice."""
        self.drain(timeout_s=0)
        self._stopping = True
        self._inbox.put(lambda: None)
        if self._thread is not None:
            self._thread.join(timeout=60)
            self._thread = None
            jax.monitoring.unregister_event_duration_listener(self._count_compile)
            self._programs.free()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    # -- the engine's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._read_inbox()
                    self._step()
                except Exception as error:
                    log.exception("a step failed; its requests are lost and the engine goes on")
                    self._fail_running(f"the step failed: {error}")
        except Exception:
            log.exception("the engine cannot go on")
            self.is_alive = False
        finally:
            self._end_everything()

    def _read_inbox(self) -> None:
        """Handles what other threads asked for; sleeps while there is nothing else to do."""
        scheduler = self._scheduler
        while not self._stopping:
            busy = scheduler.running or scheduler.waiting
            try:
                message = self._inbox.get(block=not busy)
            except queue.Empty:
                return
            message()

    def _end_everything(self) -> None:
        """Refuses what comes and gives every request its last output: the thread is about to end."""
        with self._lock:
            self._accepting = False
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                break
            except Exception:
                log.exception("while stopping")
        reason, sentence = ("abort", None) if self.is_alive else ("error", "the engine has stopped; restart the server")
        for sequence in [*self._scheduler.running.values(), *self._scheduler.waiting]:
            self._end(sequence, sequence.last_output(reason, sentence))

    def _step(self) -> None:
        """Admits what fits, runs one prompt chunk, then lets every decoding slot generate a few tokens."""
        while sequence := self._scheduler.admit_next():
            try:
                stop_ids = self._stop_ids(sequence.request.sampling)
                row = admission(self._programs.empty_admission(), sequence, stop_ids, self.vocab_size)
            except Exception as error:  # on the host, before anything shared was touched
                self._lose(sequence, f"the request could not be admitted: {error}")
                continue
            self._programs.admit(sequence.slot, row)
        prefill = self._scheduler.next_prefill()
        if prefill:
            self._prefill_chunk(prefill)
        decoding = self._scheduler.decoding()
        if decoding:
            # A prompt in progress waits for no more than one token of the others.
            more_prompts = self._scheduler.next_prefill() is not None
            self._decode(decoding, 1 if more_prompts else self.config.decode_steps)

    def _stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        return (() if sampling.ignore_eos else self.eos_token_ids) + sampling.stop_token_ids

    def _prefill_chunk(self, sequence: Sequence) -> None:
        prompt, start = sequence.request.prompt_token_ids, sequence.num_prefilled
        left = len(prompt) - start
        scored = sequence.request.sampling.prompt_logprobs is not None and left > 1
        if scored:
            # Every token but the last predicts another prompt token; the last one goes the ordinary way below.
            chunk = SCORED_CHUNK
            length = min(chunk, left - 1)
        else:
            chunk = next((c for c in self._chunks if c >= left), self._chunks[-1])
            length = min(chunk, left)
        places = chunk + self.num_draft_tokens  # the drafting depths look that many tokens further
        tokens = _padded(prompt[start : start + places], places)
        try:
            media = self._media_rows(sequence, start, places)
        except Exception as error:  # towers touch nothing that is shared
            self._programs.release(sequence.slot)
            self._lose(sequence, f"the pictures or sound could not be read: {error}")
            return
        sequence.num_prefilled += length
        self._prompt_tokens_total += length
        if scored:
            targets = prompt[start + 1 : start + 1 + length]
            scores = self._programs.prefill_scored(sequence.slot, tokens, length, _padded(targets, chunk), media)
            num_top = sequence.request.sampling.prompt_logprobs or 0
            sequence.prompt_logprobs += [token_logprob(token, scores, (i,), num_top) for i, token in enumerate(targets)]
            return
        first = self._programs.prefill(sequence.slot, tokens, length, not sequence.is_prefilling, media)
        if first:
            token, scores = first
            self._deliver(sequence, [token], lambda _: (scores, ()))

    def _media_rows(self, sequence: Sequence, start: int, length: int) -> MediaRows | None:
        """Of these prompt tokens; towers run for a chunk at a time, so that other requests wait for no more."""
        media = [m for m in sequence.request.media if m.offset < start + length and start < m.offset + len(m.rows)]
        outputs = [self._towers.outputs(item) for item in media]
        return media_rows(media, outputs, start, length, self._programs.config.hidden_size, self._programs.dtype)

    def _decode(self, decoding: list[Sequence], num_steps: int) -> None:
        wanted = any(s.request.sampling.logprobs is not None for s in decoding)
        out: Sampled = self._programs.decode(num_steps, wanted)
        for sequence in decoding:
            slot = sequence.slot
            places = np.flatnonzero(out.valid[:, slot])
            self._count_drafts(sequence, out.steps[:, slot])
            self._deliver(
                sequence,
                [int(out.tokens[place, slot]) for place in places],
                lambda i, places=places, slot=slot: (out.logprobs, (places[i], slot)),
            )

    def _count_drafts(self, sequence: Sequence, tokens_of_steps: np.ndarray) -> None:
        remaining = sequence.max_tokens - sequence.num_output_tokens
        for tokens in tokens_of_steps[tokens_of_steps > 0].tolist():
            drafted = min(self.num_draft_tokens, remaining - 1)
            sequence.speculation.add(drafted, tokens - 1)
            self.drafts_total += drafted > 0
            self._draft_tokens_total += drafted
            self._accepted_tokens_total += tokens - 1
            remaining -= tokens

    def _deliver(
        self, sequence: Sequence, tokens: list[int], scores: Callable[[int], tuple[TopLogprobs, tuple[int, ...]]]
    ) -> None:
        """Reports new tokens, and the end if this is it. `scores(i)` is where token i's log-probabilities are."""
        sampling = sequence.request.sampling
        first = sequence.num_output_tokens == 0
        sequence.num_output_tokens += len(tokens)
        self._generation_tokens_total += len(tokens)
        matched = tokens[-1] if tokens and tokens[-1] in self._stop_ids(sampling) else None
        finish = None
        if matched is not None:
            finish = "stop"
        elif sequence.num_output_tokens >= sequence.max_tokens:
            finish = "length"
        logprobs = ()
        if sampling.logprobs is not None:
            num_top = sampling.logprobs
            logprobs = tuple(token_logprob(token, *scores(i), num_top) for i, token in enumerate(tokens))
        wants_prompt = sampling.prompt_logprobs is not None
        output = Output(
            request_id=sequence.request.request_id,
            token_ids=tuple(tokens),
            logprobs=logprobs,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if first and wants_prompt else None,
            finish_reason=finish,
            matched_token_id=matched,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_output_tokens=sequence.num_output_tokens,
            speculation=sequence.speculation.snapshot(),
        )
        if finish:
            self._programs.release(sequence.slot)
            self._end(sequence, output)
        else:
            self._call_back(sequence, output)

    def _abort(self, request_id: str, reason: str) -> None:
        sequence = self._scheduler.find(request_id)
        if sequence is None:  # it ended while the abort was on its way
            return
        if sequence.slot >= 0:
            self._programs.release(sequence.slot)
        self._end(sequence, sequence.last_output(reason))

    def _fail_running(self, sentence: str) -> None:
        """Ends every running request and starts from empty device state; waiting requests lose nothing."""
        for sequence in list(self._scheduler.running.values()):
            self._end(sequence, sequence.last_output("error", sentence))
        self._programs.reset()

    def _lose(self, sequence: Sequence, sentence: str) -> None:
        """Ends one request with the exception at hand, which is its own alone."""
        log.exception("request %s is lost", sequence.request.request_id)
        self._end(sequence, sequence.last_output("error", sentence))

    def _end(self, sequence: Sequence, output: Output) -> None:
        self._scheduler.finish(sequence)
        with self._lock:
            self._known.discard(sequence.request.request_id)
        self._call_back(sequence, output)
        with self._lock:
            if not self._known:
                self._idle.set()

    def _call_back(self, sequence: Sequence, output: Output) -> None:
        try:
            if self.observer is not None:
                self.observer(sequence, output)
        except BaseException:  # who counts requests must not harm them
            log.exception("the engine's observer raised")
        try:
            sequence.on_output(output)
        except BaseException:  # one reader's fault, whatever it is, must not end the others' requests
            log.exception("on_output of request %s raised", output.request_id)

    def _count_compile(self, event: str, duration_secs: float, **_: str | int) -> None:
        # Other users of JAX in this process compile on their own threads.
        if event == COMPILE_EVENT and threading.current_thread() is self._thread:
            self.compiles_since_ready += 1
            log.warning("compiled a program while serving (%.1f s): please report how", duration_secs)


def _padded(tokens: tuple[int, ...], size: int) -> np.ndarray:
    padded = np.zeros(size, np.int32)
    padded[: len(tokens)] = tokens
    return padded
