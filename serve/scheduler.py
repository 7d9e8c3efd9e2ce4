"""Which request runs next: slots, pages, the waiting queue. Host bookkeeping only; the engine thread owns it."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable

from modeling.cache import CacheShape, pages_for
from serve.pages import PagePool
from serve.request import Output, Request, TokenLogprob
from serve.speculative import SpeculationCount


@dataclasses.dataclass
class Sequence:
    """A request on its way through the engine.

    Attributes:
        max_tokens: what it may generate, within the context.
        slot: its slot while it runs.
        num_prefilled: prompt tokens in the cache.
        num_output_tokens: tokens generated.
        prompt_logprobs: of the prompt tokens scored so far (the first has none).
        speculation: how its drafts fared.
        arrived_at, admitted_at: `time.monotonic()` when it was submitted and when it got its slot; None before that.
        first_token_at, last_token_at: likewise of its tokens, where an observer of the engine keeps them.
    """

    request: Request
    on_output: Callable[[Output], None]
    max_tokens: int
    slot: int = -1
    full_pages: list[int] = dataclasses.field(default_factory=list)
    window_pages: list[int] = dataclasses.field(default_factory=list)
    num_prefilled: int = 0
    num_output_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] = dataclasses.field(default_factory=lambda: [None])
    speculation: SpeculationCount = dataclasses.field(default_factory=SpeculationCount)
    arrived_at: float = dataclasses.field(default_factory=time.monotonic)
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def is_prefilling(self) -> bool:
        return self.num_prefilled < self.num_prompt_tokens

    def last_output(self, reason: str, error: str | None = None) -> Output:
        """The news that it ended without new tokens: "abort", or "error" with a sentence."""
        return Output(
            request_id=self.request.request_id,
            finish_reason=reason,
            error=error,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            speculation=self.speculation.snapshot(),
        )


class Scheduler:
    """First come, first served. A request is admitted once a slot and all the pages it may ever need are free, so a
    running request never has to give pages back."""

    def __init__(self, num_slots: int, cache: CacheShape):
        self.cache = cache
        self.full_pool, self.window_pool = PagePool(cache.num_full_pages), PagePool(cache.num_window_pages)
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: dict[int, Sequence] = {}  # by slot, oldest first
        self._free_slots = list(range(num_slots - 1, -1, -1))

    def pages_needed(self, num_tokens: int) -> tuple[int, int]:
        """Full and window pages of a sequence that ends with `num_tokens` tokens in the cache."""
        full = pages_for(num_tokens)
        return full, min(full, self.cache.ring)

    def admit_next(self) -> Sequence | None:
        """Moves the head of the queue into a slot, if there is room for it."""
        if not self.waiting or not self._free_slots:
            return None
        sequence = self.waiting[0]
        # The last token generated is never written to the cache.
        full, window = self.pages_needed(sequence.num_prompt_tokens + sequence.max_tokens - 1)
        if full > self.full_pool.num_free or window > self.window_pool.num_free:
            return None
        self.waiting.popleft()
        sequence.slot = self._free_slots.pop()
        sequence.full_pages, sequence.window_pages = self.full_pool.take(full), self.window_pool.take(window)
        self.running[sequence.slot] = sequence
        sequence.admitted_at = time.monotonic()
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Frees what a running sequence holds, or takes a waiting one out of the queue."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        del self.running[sequence.slot]
        self.full_pool.give_back(sequence.full_pages)
        self.window_pool.give_back(sequence.window_pages)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def next_prefill(self) -> Sequence | None:
        """The oldest running sequence whose prompt is not yet in the cache."""
        return next((s for s in self.running.values() if s.is_prefilling), None)

    def decoding(self) -> list[Sequence]:
        return [s for s in self.running.values() if not s.is_prefilling]

    def find(self, request_id: str) -> Sequence | None:
        everyone = [*self.running.values(), *self.waiting]
        return next((s for s in everyone if s.request.request_id == request_id), None)
