"""Tiny Flints of the real structure, with random weights, for tests."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from modeling.batch import Batch
from modeling.cache import CacheShape, PageTables, make_cache
from modeling.flint.config import FlintConfig
from modeling.flint.model import Flint
from modeling.parameters import random_parameters

SIZES = dict(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=4,  # full dense, full dense, sliding sparse, full sparse
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=128,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    num_experts=8,
    num_experts_per_tok=2,
    sliding_window=9,
    max_position_embeddings=1024,
)


def tiny_config(**changes) -> FlintConfig:
    return FlintConfig(**(SIZES | changes))


def tiny_flint(seed: int = 0, dtype=jnp.float32, weight_format="bf16", router_dtype="float32", **changes) -> Flint:
    options = dict(dtype=dtype, weight_format=weight_format, router_dtype=router_dtype)
    return random_parameters(Flint.abstract(tiny_config(**changes), **options), seed)


def random_tokens(model: Flint, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, shape).astype(np.int32)


def dense_logits(model: Flint, tokens: np.ndarray) -> np.ndarray:
    """The definition: no cache, every expert."""
    return np.asarray(run_definition(model, tokens))


def relative(a, b) -> float:
    """Relative Frobenius error."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@functools.partial(jax.jit, donate_argnums=2)
def run_step(model: Flint, batch: Batch, cache):
    """Logits of a chunk and the updated cache."""
    hidden, cache = model.forward(batch, cache)
    return model.logits(hidden), cache


@jax.jit
def run_definition(model: Flint, tokens):
    return model(tokens)


class Cached:
    """A model with a cache of `rows` sequences, run chunk by chunk; pages are dealt out shuffled and poisoned."""

    def __init__(self, model: Flint, rows: int, max_len: int, max_chunk: int, poison: float = float("nan")):
        self.model = model
        self.shape = CacheShape.for_sequences(model.config, rows, max_len, max_chunk)
        cache = make_cache(model.config, self.shape, model.dtype)
        self.cache = jax.tree.map(lambda pool: jnp.full_like(pool, poison), cache)
        deal = np.random.default_rng(7).permutation
        self.pages = PageTables(
            jnp.asarray(deal(self.shape.num_full_pages).reshape(rows, -1), jnp.int32),
            jnp.asarray(deal(self.shape.num_window_pages).reshape(rows, -1), jnp.int32),
            jnp.asarray(deal(rows), jnp.int32),
        )
        self.lengths = np.zeros(rows, np.int32)

    def __call__(self, tokens: np.ndarray, lengths=None) -> np.ndarray:
        """tokens [rows, chunk], `lengths` [rows] real ones -> logits [rows, chunk, vocab]."""
        lengths = np.full(len(tokens), tokens.shape[1], np.int32) if lengths is None else np.asarray(lengths, np.int32)
        batch = Batch(jnp.asarray(tokens), jnp.asarray(self.lengths.copy()), jnp.asarray(lengths), self.pages)
        logits, self.cache = run_step(self.model, batch, self.cache)
        self.lengths += lengths
        return np.asarray(logits)

    def in_chunks(self, tokens: np.ndarray, chunks) -> np.ndarray:
        out, start = [], 0
        for chunk in chunks:
            out.append(self(tokens[:, start : start + chunk]))
            start += chunk
        assert start == tokens.shape[1]
        return np.concatenate(out, axis=1)
