"""What goes into the engine and what comes out: token ids, never text."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Literal

import numpy as np


class InvalidRequest(ValueError):
    """The request can never be served as it stands; the message says what to change. gRPC: INVALID_ARGUMENT."""


class EngineBusy(RuntimeError):
    """The waiting queue is full; the same request may succeed later. gRPC: RESOURCE_EXHAUSTED."""


class EngineClosed(RuntimeError):
    """The engine is draining or has stopped. gRPC: UNAVAILABLE."""


MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 16
LARGEST_PIXEL = 1e6  # normalised; a tower's arithmetic overflows on numbers that are finite but immense


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Meanings and defaults are vLLM's.

    Attributes:
        temperature: 0 means greedy.
        top_k: keep the k most likely tokens; 0, -1 or at least the vocabulary size mean no limit.
        top_p: keep the smallest set whose probability reaches this, in (0, 1].
        min_p: drop tokens less likely than this times the most likely one, in [0, 1].
        repetition_penalty: in [0.01, 100]; divides the positive logits of prompt and output tokens, multiplies the
            negative ones.
        presence_penalty: subtracted once from the logit of every token already generated.
        frequency_penalty: subtracted as many times as the token was generated.
        logit_bias: token id -> value added to its logit.
        seed: fixes this request's random numbers, whatever else runs beside it. None draws one.
        max_tokens: most tokens to generate; None means as many as the context holds.
        min_tokens: no end or stop token may be sampled before this many tokens.
        stop_token_ids: end the request like an end token; at most MAX_STOP_TOKENS with the model's own.
        ignore_eos: the model's end tokens are ordinary tokens; `stop_token_ids` still stop.
        logprobs: None for none, else the sampled token's log-probability and this many (0..20) of the most likely.
            They are of the model's distribution before temperature, penalties, bias and filters.
        prompt_logprobs: likewise for every prompt token but the first.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Media:
    """One picture or clip, already cut into what a tower reads: one row a placeholder token.

    Attributes:
        kind: which tower reads it.
        rows: image: [patches, 2, patch_size, patch_size, 3] float32, normalised. audio: [frames, mel_bins] uint8, dMel
            bins.
        offset: index in the prompt's token ids of its first placeholder; the others follow without a gap.
    """

    kind: Literal["image", "audio"]
    rows: np.ndarray
    offset: int

    @functools.cached_property
    def is_finite(self) -> bool:
        """Whether all values are numbers, and none beyond LARGEST_PIXEL."""
        return bool(-LARGEST_PIXEL <= self.rows.min() <= self.rows.max() <= LARGEST_PIXEL)  # a NaN is the least of all

    @functools.cached_property
    def content_hash(self) -> str:
        """Names the content wherever it is placed; SHA-256 in hex."""
        digest = hashlib.sha256(f"{self.kind} {self.rows.dtype} {self.rows.shape} ".encode())
        digest.update(np.ascontiguousarray(self.rows).data)  # pictures may be hundreds of megabytes: no copy
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to continue. `request_id` is unique among the requests in the engine.

    Attributes:
        media: pictures and clips in the order of their offsets; every placeholder token belongs to exactly one.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    media: tuple[Media, ...] = ()


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """One position: the token, its log-probability, and the most likely tokens with theirs, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How a request's drafts fared so far; without speculation `num_steps` alone counts.

    Attributes:
        num_steps: decode steps; each gives one token and the accepted drafts.
        num_draft_tokens, num_accepted_tokens: drafts checked, and those that became output.
        accepted_by_depth: of the first draft of a step, the second and so on, how many were accepted.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_depth: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Output:
    """News of one request: the tokens since the last `Output`.

    Attributes:
        token_ids: new tokens. An end or stop token that ended the request is the last of them.
        logprobs: one entry a new token where asked for, else empty.
        prompt_logprobs: on the first `Output` where asked for: None for the first prompt token, then one a token.
        finish_reason: None while it goes on; "stop" (end or stop token), "length", "abort", or "error".
        matched_token_id: the end or stop token, with "stop".
        error: a sentence, with "error".
        num_prompt_tokens, num_output_tokens, num_cached_tokens: totals so far.
        speculation: likewise, of drafts.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    matched_token_id: int | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    speculation: Speculation = Speculation()


@dataclasses.dataclass(frozen=True)
class Completion:
    """A whole finished request, as `Engine.generate` yields it."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    matched_token_id: int | None = None
    error: str | None = None
    speculation: Speculation = Speculation()


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine. Totals count since the start; pages are those of the full-attention layers."""

    num_running: int
    num_waiting: int
    num_slots: int
    kv_pages_used: int
    kv_pages_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0
