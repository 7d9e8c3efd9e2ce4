"""Checks at the door: a request that can never be served is refused before it is queued."""

from __future__ import annotations

import math

from serve.request import MAX_LOGPROBS, MAX_STOP_TOKENS, InvalidRequest, Request, SamplingParams

MAX_LOGIT_BIAS = 512  # entries
FLOAT32_MAX = 3.4028235e38


def check_request(request: Request, max_model_len: int, vocab_size: int, num_eos: int) -> int:
    """How many tokens the request may generate within the context.

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
    bad = next((i for i in prompt if not 0 <= i < vocab_size), None)
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
