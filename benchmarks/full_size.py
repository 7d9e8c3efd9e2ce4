"""Published sizes with random weights, made on the device, and the device's own rates to compare with."""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp

from modeling.cache import Cache, CacheShape, PageTables, consecutive_pages, make_cache
from modeling.flint.config import FlintConfig
from modeling.flint.model import Flint
from modeling.parameters import random_parameters

MODELS = {"flint": FlintConfig()}


def full_size(
    config: FlintConfig, weight_format: str, batch: int, max_len: int, max_chunk: int
) -> tuple[Flint, Cache, PageTables]:
    """A model and the cache of `batch` sequences of `max_len` tokens, filled with random values."""
    model = random_parameters(Flint.abstract(config, weight_format=weight_format), seed=0)
    shape = CacheShape.for_sequences(config, batch, max_len, max_chunk)
    empty = jax.eval_shape(lambda: make_cache(config, shape, model.dtype))
    cache = jax.tree.map(lambda pool: jax.random.normal(jax.random.key(1), pool.shape, pool.dtype), empty)
    return model, cache, consecutive_pages(shape)


def streaming_read_bandwidth() -> float:
    """Bytes a second of a plain sum over memory, the most that a decode step could reach.

    Eight sums over 4 GiB in one launch (16 MiB on a CPU), each with another addend so that none can be shared.
    """
    size, sums = (4 << 30 if jax.default_backend() != "cpu" else 16 << 20), 8
    data = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)

    @jax.jit
    def read(data):
        return jax.lax.fori_loop(0, sums, lambda i, total: total + (data ^ total).sum(dtype=jnp.uint32), jnp.uint32(1))

    read(data).block_until_ready()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        read(data).block_until_ready()
        times.append(time.perf_counter() - started)
    return sums * size / statistics.median(times)


def matrix_rate() -> float:
    """Multiply-adds times two a second of a bf16 product of random 8192 x 8192 matrices (256 on a CPU)."""
    n = 8192 if jax.default_backend() != "cpu" else 256
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda a, b: a @ b)
    product(a, b).block_until_ready()
    times = []
    for _ in range(10):
        started = time.perf_counter()
        product(a, b).block_until_ready()
        times.append(time.perf_counter() - started)
    return 2 * n**3 / statistics.median(times)
