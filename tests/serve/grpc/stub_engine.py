"""An engine without a model: the same interface as `serve.engine.Engine`, no JAX, tokens that can be told in advance.

It repeats its prompt: output token i is `prompt[(i + seed) % len(prompt)]`, with 0 for no seed. Whoever tests a
server on it therefore chooses the output by choosing the prompt, end tokens and stop strings included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from serve.request import (
    Completion,
    EngineBusy,
    EngineClosed,
    EngineStats,
    InvalidRequest,
    Output,
    Request,
    TokenLogprob,
)
from serve.validate import check_request


class _Sequence:
    """One request on its way: queued, then in a slot until it finishes."""

    def __init__(self, request: Request, on_output: Callable[[Output], None]):
        self.request = request
        self.on_output = on_output
        self.tokens: list[int] = []
        self.first_step_at: float | None = None
        self.aborted = False


class StubEngine:
    """Echoes prompts from one thread, as the real engine computes from one thread.

    Args:
        vocab_size: token ids are below this.
        max_model_len: most prompt and output tokens of one sequence.
        eos_token_ids: the model's end tokens.
        num_slots: sequences that run at once.
        max_queue: sequences that may wait for a slot.
        step_seconds: time of one step (one token of every running sequence).
        prefill_seconds: time between getting a slot and the first token.
        fail_after: end every sequence with an error after this many tokens.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 1024,
        max_model_len: int = 4096,
        eos_token_ids: tuple[int, ...] = (),
        num_slots: int = 4,
        max_queue: int = 64,
        step_seconds: float = 0.0,
        prefill_seconds: float = 0.0,
        fail_after: int | None = None,
    ):
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.compiles_since_ready = 0
        self.is_alive = True
        self.submitted: list[Request] = []
        self._num_slots, self._max_queue = num_slots, max_queue
        self._step_seconds, self._prefill_seconds, self._fail_after = step_seconds, prefill_seconds, fail_after
        self._changed = threading.Condition()
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._accepting, self._closed = True, False
        self._prompt_tokens = self._generated_tokens = 0
        self._thread = threading.Thread(target=self._run, name="stub-engine", daemon=True)

    def start(self) -> None:
        """Starts the engine thread."""
        self._thread.start()

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        """Queues a request; raises `InvalidRequest`, `EngineBusy` or `EngineClosed`."""
        check_request(request, self.max_model_len, self.vocab_size, len(self.eos_token_ids))
        with self._changed:
            if not self._accepting:
                raise EngineClosed("The engine is draining.")
            if len(self._waiting) + len(self._running) >= self._max_queue + self._num_slots:
                raise EngineBusy(f"{self._max_queue} requests are waiting already; send it again later.")
            live = (sequence.request.request_id for sequence in self._waiting + self._running)
            if request.request_id in live:
                raise InvalidRequest(f"Request id {request.request_id!r} is in use.")
            self.submitted.append(request)
            self._waiting.append(_Sequence(request, on_output))
            self._changed.notify()

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """Ends a request; True if it was known. Its last `Output` says "abort", whatever the reason."""
        del reason
        with self._changed:
            found = [s for s in self._waiting + self._running if s.request.request_id == request_id]
            for sequence in found:
                sequence.aborted = True
            self._changed.notify()
            return bool(found)

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Runs each request to its end, one after the other."""
        for request in requests:
            outputs: list[Output] = []
            done = threading.Event()

            def collect(output: Output, outputs: list[Output] = outputs, done: threading.Event = done) -> None:
                outputs.append(output)
                if output.finish_reason:
                    done.set()

            self.submit(request, collect)
            done.wait()
            yield Completion(
                request_id=request.request_id,
                token_ids=tuple(token for output in outputs for token in output.token_ids),
                finish_reason=outputs[-1].finish_reason or "error",
                matched_token_id=outputs[-1].matched_token_id,
                error=outputs[-1].error,
            )

    def stats(self) -> EngineStats:
        """Counts of this moment; the stub's pages are its slots."""
        with self._changed:
            return EngineStats(
                num_running=len(self._running),
                num_waiting=len(self._waiting),
                num_slots=self._num_slots,
                kv_pages_used=len(self._running),
                kv_pages_total=self._num_slots,
                prompt_tokens_total=self._prompt_tokens,
                generation_tokens_total=self._generated_tokens,
            )

    def drain(self, timeout_s: float) -> None:
        """Takes no new requests, waits for the present ones, then aborts what is left."""
        with self._changed:
            self._accepting = False
            self._changed.wait_for(lambda: self._closed or not (self._waiting or self._running), timeout_s)
            for sequence in self._waiting + self._running:
                sequence.aborted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or not (self._waiting or self._running), timeout_s)

    def close(self) -> None:
        """Stops the thread; requests still there get no more outputs."""
        with self._changed:
            self._accepting, self._closed = False, True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def die(self) -> None:
        """As when the real engine's thread dies: nothing comes any more, and nobody is told."""
        self.is_alive = False
        with self._changed:
            self._accepting, self._closed = False, True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting or self._running)
                if self._closed:
                    return
                self._admit()
                running = list(self._running) + [s for s in self._waiting if s.aborted]
            finished = [sequence for sequence in running if self._step(sequence)]
            with self._changed:
                self._running = [s for s in self._running if s not in finished]
                self._waiting = [s for s in self._waiting if s not in finished]
                self._changed.notify_all()
            time.sleep(self._step_seconds)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._num_slots:
            sequence = self._waiting.pop(0)
            sequence.first_step_at = time.monotonic() + self._prefill_seconds
            self._prompt_tokens += len(sequence.request.prompt_token_ids)
            self._running.append(sequence)

    def _step(self, sequence: _Sequence) -> bool:
        """One token of one sequence; True when that was its last."""
        if sequence.aborted:
            self._emit(sequence, finish_reason="abort")
            return True
        if time.monotonic() < (sequence.first_step_at or 0.0):
            return False
        if self._fail_after is not None and len(sequence.tokens) >= self._fail_after:
            self._emit(sequence, finish_reason="error", error="The stub was told to fail.")
            return True
        sampling, token = sequence.request.sampling, self._next_token(sequence)
        sequence.tokens.append(token)
        self._generated_tokens += 1
        room = self.max_model_len - len(sequence.request.prompt_token_ids)
        if token in self._stop_tokens(sequence):
            self._emit(sequence, token, finish_reason="stop", matched_token_id=token)
        elif len(sequence.tokens) >= min(room, sampling.max_tokens or room):
            self._emit(sequence, token, finish_reason="length")
        else:
            self._emit(sequence, token)
            return False
        return True

    def _stop_tokens(self, sequence: _Sequence) -> frozenset[int]:
        sampling = sequence.request.sampling
        return frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else self.eos_token_ids))

    def _next_token(self, sequence: _Sequence) -> int:
        prompt, sampling, i = sequence.request.prompt_token_ids, sequence.request.sampling, len(sequence.tokens)
        token = prompt[(i + (sampling.seed or 0)) % len(prompt)]
        while i < sampling.min_tokens and token in self._stop_tokens(sequence):
            token = (token + 1) % self.vocab_size
        return token

    def _logprob(self, token: int, top: int) -> TokenLogprob:
        alternatives = tuple(((token + i) % self.vocab_size, -0.5 - i) for i in range(top))
        return TokenLogprob(token, -0.5, alternatives)

    def _emit(self, sequence: _Sequence, token: int | None = None, **end) -> None:
        sampling, prompt = sequence.request.sampling, sequence.request.prompt_token_ids
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None and len(sequence.tokens) == 1 and token is not None:
            prompt_logprobs = (None, *(self._logprob(t, sampling.prompt_logprobs) for t in prompt[1:]))
        logprobs = ()
        if token is not None and sampling.logprobs is not None:
            logprobs = (self._logprob(token, sampling.logprobs),)
        sequence.on_output(
            Output(
                request_id=sequence.request.request_id,
                token_ids=() if token is None else (token,),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                num_prompt_tokens=len(prompt),
                num_output_tokens=len(sequence.tokens),
                **end,
            )
        )
