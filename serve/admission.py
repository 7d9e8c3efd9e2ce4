"""A request's row of the device's state, from its sampling parameters and pages."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as AnySequence

import numpy as np

from serve.programs import Admission
from serve.scheduler import Sequence


def admission(row: Admission, sequence: Sequence, stop_ids: AnySequence[int], vocab_size: int) -> Admission:
    """The neutral `row` filled with what `sequence` asks for and has been given."""
    sampling = sequence.request.sampling
    for values, source in (
        (row.stop_ids, stop_ids),
        (row.bias_ids, list(sampling.logit_bias)),
        (row.bias_values, list(sampling.logit_bias.values())),
        (row.full_pages, sequence.full_pages),
        (row.window_pages, sequence.window_pages),
    ):
        values[: len(source)] = source
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed % (1 << 64)
    return row._replace(
        temperature=np.float32(sampling.temperature),
        top_k=np.int32(min(max(sampling.top_k, 0), vocab_size)),
        top_p=np.float32(sampling.top_p),
        min_p=np.float32(sampling.min_p),
        repetition_penalty=np.float32(sampling.repetition_penalty),
        presence_penalty=np.float32(sampling.presence_penalty),
        frequency_penalty=np.float32(sampling.frequency_penalty),
        key=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        min_tokens=np.int32(sampling.min_tokens),
        max_tokens=np.int32(sequence.max_tokens),
    )
