"""How many pages the device's memory allows."""

from __future__ import annotations

import dataclasses

import jax

from modeling.architecture import Model
from modeling.cache import CacheShape


def cache_shape(
    model: Model,
    num_slots: int,
    max_model_len: int,
    max_chunk: int,
    num_drafts: int = 0,
    cache_bytes: int | None = None,
) -> CacheShape:
    """The pools that the memory allows: enough for every slot at full length, or as many pages as fit.

    Args:
        max_chunk: longest prefill chunk, in tokens. num_drafts: tokens drafted a step.
        cache_bytes: see `serve.engine.EngineConfig`.

    Raises:
        ValueError: not even one sequence of `max_model_len` tokens fits.
    """
    wanted = CacheShape.for_sequences(model.config, num_slots, max_model_len, max_chunk, num_drafts)
    budget = cache_bytes if cache_bytes is not None else _available_bytes()
    fixed = dataclasses.replace(wanted, num_full_pages=0).bytes(model.config, model.dtype)
    page = dataclasses.replace(wanted, num_full_pages=1).bytes(model.config, model.dtype) - fixed
    fitting = min(wanted.num_full_pages, (budget - fixed) // page) if page else wanted.num_full_pages
    if fitting < wanted.max_pages:
        raise ValueError(
            f"the KV cache may take {budget / 2**30:.2f} GiB, but one sequence of {max_model_len} tokens beside the "
            f"windows of {num_slots} slots needs {(fixed + wanted.max_pages * page) / 2**30:.2f} GiB; "
            "lower max_model_len, num_slots or num_draft_tokens"
        )
    return dataclasses.replace(wanted, num_full_pages=fitting)


def _available_bytes() -> int:
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return 4 << 30
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    return int(free * 0.8)  # the rest is for activations
