"""Checks at the door: a request that can never be served is refused before it is queued."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping

import numpy as np

from serve.request import LARGEST_PIXEL, MAX_LOGPROBS, MAX_STOP_TOKENS, InvalidRequest, Request, SamplingParams

MAX_LOGIT_BIAS = 512  # entries
FLOAT32_MAX = 3.4028235e38


@dataclasses.dataclass(frozen=True)
class Placeholder:
    """What stands for one row of a picture or clip, and what such a row looks like."""

    token_id: int
    row: tuple[int, ...]  # shape
    bins: int | None = None  # values of audio rows are 0 .. bins - 1


def check_media(request: Request, placeholders: Mapping[str, Placeholder]) -> None:
    """Every placeholder belongs to exactly one row of a picture or clip, and rows are what the towers read.

    Raises:
        InvalidRequest: the first thing wrong, and what to change.
    """
    prompt, end = np.asarray(request.prompt_token_ids), 0
    for i, item in enumerate(request.media):
        what = f"medium {i} ({item.kind})"
        place = placeholders.get(item.kind)
        if place is None:
            raise InvalidRequest(f"{what}: this model reads no {item.kind}; leave it out")
        if item.rows.shape[1:] != place.row or not len(item.rows):
            raise InvalidRequest(f"{what}: rows must be [1 or more, {', '.join(map(str, place.row))}], not of shape "
                                 f"{list(item.rows.shape)}")  # fmt: skip
        if item.rows.dtype != (np.float32 if place.bins is None else np.uint8):
            raise InvalidRequest(f"{what}: rows must be {'float32' if place.bins is None else 'uint8'}")
        if place.bins is not None and item.rows.max() >= place.bins:
            raise InvalidRequest(f"{what}: bins must be 0..{place.bins - 1}, not {item.rows.max()}")
        if place.bins is None and not item.is_finite:
            raise InvalidRequest(f"{what}: rows must be normalised pixels, finite and at most {LARGEST_PIXEL:g}")
        if item.offset < end:
            raise InvalidRequest(f"{what} begins at token {item.offset}, before the medium ahead of it ends")
        end = item.offset + len(item.rows)
        if end > len(prompt) or (prompt[item.offset : end] != place.token_id).any():
            raise InvalidRequest(
                f"{what} has {len(item.rows)} rows, but prompt tokens {item.offset}..{end - 1} are not as many "
                f"placeholders ({place.token_id})"
            )
    for kind, place in placeholders.items():
        count = int((prompt == place.token_id).sum())
        rows = sum(len(item.rows) for item in request.media if item.kind == kind)
        if count != rows:
            raise InvalidRequest(f"the prompt has {count} {kind} placeholders ({place.token_id}) for {rows} rows")


def check_request(
    request: Request, max_model_len: int, vocab_size: int, num_eos: int, placeholder_ids: Container[int] = ()
) -> int:
    """How many tokens the request may generate within the context.

    `placeholder_ids` may stand in a prompt too, wherever they are in the vocabulary.

    Raises:
        InvalidRequest: the first thing wrong with it, and what to change.
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not prompt:
        raise InvalidRequest("the prompt is empty; give at least one token")
    if len(prompt) >= max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens; prompt and output together may have {max_model_len}. Shorten it"
        )
    bad = next((i for i in prompt if not 0 <= i < vocab_size and i not in placeholder_ids), None)
    if bad is not None:
        raise InvalidRequest(f"prompt token ids must be 0..{vocab_size - 1}, not {bad}")
    check_sampling(sampling, vocab_size, num_eos)
    if sampling.min_tokens > max_model_len:
        raise InvalidRequest(f"min_tokens {sampling.min_tokens} exceeds the context of {max_model_len} tokens")
    room = max_model_len - len(prompt)
    return room if sampling.max_tokens is None else min(sampling.max_tokens, room)


def check_sampling(s: SamplingParams, vocab_size: int, num_eos: int) -> None:
    """Raises InvalidRequest where a value is outside its range."""

    def need(ok: bool, sentence: str) -> None:
        if not ok:
            raise InvalidRequest(sentence)

    numbers = (s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    # The device computes in float32, where a larger number is infinite.
    need(all(abs(x) <= FLOAT32_MAX for x in numbers), "sampling parameters must be finite float32 numbers")
    need(s.temperature >= 0, f"temperature must be at least 0, not {s.temperature}")
    need(s.top_k >= -1, f"top_k must be -1 or 0 (no limit) or positive, not {s.top_k}")
    need(0 < s.top_p <= 1, f"top_p must be in (0, 1], not {s.top_p}")
    need(0 <= s.min_p <= 1, f"min_p must be in [0, 1], not {s.min_p}")
    need(0.01 <= s.repetition_penalty <= 100, f"repetition_penalty must be in [0.01, 100], not {s.repetition_penalty}")
    for name in ("presence_penalty", "frequency_penalty"):
        need(-2 <= getattr(s, name) <= 2, f"{name} must be in [-2, 2], not {getattr(s, name)}")
    need(s.max_tokens is None or s.max_tokens >= 1, f"max_tokens must be at least 1, not {s.max_tokens}")
    need(s.min_tokens >= 0, f"min_tokens must be at least 0, not {s.min_tokens}")
    if s.max_tokens is not None:
        need(s.min_tokens <= s.max_tokens, f"min_tokens {s.min_tokens} exceeds max_tokens {s.max_tokens}")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(s, name)
        need(value is None or 0 <= value <= MAX_LOGPROBS, f"{name} must be 0..{MAX_LOGPROBS}, not {value}")
    need(
        num_eos + len(s.stop_token_ids) <= MAX_STOP_TOKENS,
        f"{len(s.stop_token_ids)} stop_token_ids are too many; {MAX_STOP_TOKENS - num_eos} fit beside the model's own",
    )
    for i in s.stop_token_ids:
        need(0 <= i < vocab_size, f"stop_token_ids must be 0..{vocab_size - 1}, not {i}")
    need(len(s.logit_bias) <= MAX_LOGIT_BIAS, f"logit_bias may have {MAX_LOGIT_BIAS} entries, not {len(s.logit_bias)}")
    for i, value in s.logit_bias.items():
        need(0 <= i < vocab_size, f"logit_bias ids must be 0..{vocab_size - 1}, not {i}")
        need(math.isfinite(value) and -100 <= value <= 100, f"logit_bias values must be -100..100, not {value}")
