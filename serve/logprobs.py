"""Log-probabilities as the device gives them, and as an answer carries them."""

from __future__ import annotations

from typing import Any

from modeling.sampling import TopLogprobs
from serve.request import TokenLogprob


def token_logprob(token: int, scores: TopLogprobs, at: tuple[int, ...], num_top: int) -> TokenLogprob:
    """The host's view of one position `at` of the arrays in `scores`."""
    ids, values = scores.top_ids[at][:num_top], scores.top[at][:num_top]
    top = tuple((int(i), _finite(v)) for i, v in zip(ids, values, strict=True))
    return TokenLogprob(token, _finite(scores.chosen[at]), top)


def _finite(logprob: Any) -> float:
    """A banned token has -inf, and a placeholder past the kept vocabulary NaN; JSON readers want finite numbers."""
    return max(-9999.0, float(logprob))  # in this order: nothing is larger than NaN, and NaN than nothing
