"""Log-probabilities as the device gives them, and as an answer carries them."""

from __future__ import annotations

from modeling.sampling import TopLogprobs
from serve.request import TokenLogprob


def token_logprob(token: int, scores: TopLogprobs, at: tuple[int, ...], num_top: int) -> TokenLogprob:
    """The host's view of one position `at` of the arrays in `scores`."""
    ids, values = scores.top_ids[at][:num_top], scores.top[at][:num_top]
    # A banned token may have -inf; JSON and protobuf readers want finite numbers.
    top = tuple((int(i), max(float(v), -9999.0)) for i, v in zip(ids, values, strict=True))
    return TokenLogprob(token, max(float(scores.chosen[at]), -9999.0), top)
