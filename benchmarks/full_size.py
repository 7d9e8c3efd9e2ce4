"""Published sizes with random weights, made on the device, and the device's own rates to compare with."""

from __future__ import annotations

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp

from modeling.architecture import Config, Model
from modeling.cache import Cache, CacheShape, PageTables, consecutive_pages, make_cache
from modeling.flint.config import FlintConfig
from modeling.flint.model import Flint
from modeling.inkling.config import INKLING_SMALL, InklingConfig
from modeling.inkling.model import Inkling
from modeling.parameters import random_parameters

MODELS: dict[str, Config] = {"flint": FlintConfig(), "inkling": InklingConfig(), "inkling-small": INKLING_SMALL}


def abstract_model(config: Config, weight_format: str, num_drafts: int = 0) -> Model:
    """A published model's shape table. In Inkling "nvfp4" packs the routed experts from layer 3 on, as released."""
    if isinstance(config, FlintConfig):
        return Flint.abstract(config, weight_format=weight_format)
    formats = tuple("bf16" if layer < 3 else weight_format for layer in range(config.num_hidden_layers))
    return Inkling.abstract(config, expert_formats=formats, num_mtp_layers=num_drafts)


def with_layers(config: Config, num_layers: int | None) -> Config:
    """The config's first layers only, for a small device; None for all of them."""
    if num_layers is None:
        return config
    return dataclasses.replace(config, num_hidden_layers=num_layers, layer_types=(), sparse_layers=())


def full_size(
    config: Config, weight_format: str, batch: int, max_len: int, max_chunk: int, num_drafts: int = 0
) -> tuple[Model, Cache, PageTables]:
    """A model and the cache of `batch` sequences of `max_len` tokens, filled with random values."""
    model = random_parameters(abstract_model(config, weight_format, num_drafts), seed=0)
    shape = CacheShape.for_sequences(config, batch, max_len, max_chunk, num_drafts)
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
