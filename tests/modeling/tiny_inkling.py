"""Tiny Inklings of the real structure, with random weights, for tests."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from modeling.batch import Batch
from modeling.cache import CacheShape, PageTables, make_cache
from modeling.inkling.config import FULL, SLIDING, AudioConfig, InklingConfig, MTPConfig, VisionConfig
from modeling.inkling.layer import Step
from modeling.inkling.model import Inkling
from modeling.inkling.mtp import draft, mtp_hidden, prefill_depths, remember
from modeling.parameters import random_parameters

SIZES = dict(
    vocab_size=160,
    kept_vocab_size=150,
    hidden_size=32,
    num_hidden_layers=4,  # sliding dense, full dense, sliding sparse, full sparse
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=16,
    sliding_window=9,
    d_rel=4,
    rel_extent=20,
    log_scaling_n_floor=24,
    layer_types=(SLIDING, FULL, SLIDING, FULL),
    sparse_layers=(False, False, True, True),
    logits_mup_width_multiplier=2.0,
    num_experts=8,
    num_experts_per_tok=2,
    intermediate_size=64,
    moe_intermediate_size=32,
    route_scale=2.5,
    max_position_embeddings=2048,
    eos_token_ids=(2,),
    vision=VisionConfig(patch_size=4, num_layers=3),
    audio=AudioConfig(num_mel_bins=8, mel_vocab_size=4),
    mtp=MTPConfig((SLIDING, FULL, SLIDING)),
    image_token_id=148,
    audio_token_id=149,
    image_bos_token_id=140,
    audio_bos_token_id=141,
    audio_end_token_id=142,
)
VISION_LINEARS = ((32, 12), (64, 128), (32, 128))  # 4 x 4 pixels: 2 x 2, 2 x 2, then 2 in time


def tiny_inkling_config(**changes) -> InklingConfig:
    return InklingConfig(**(SIZES | changes))


def tiny_inkling(
    seed: int = 0, dtype=jnp.float32, num_mtp_layers=3, towers=False, expert_formats=None, **changes
) -> Inkling:
    abstract = Inkling.abstract(
        tiny_inkling_config(**changes),
        dtype=dtype,
        expert_formats=expert_formats,
        num_mtp_layers=num_mtp_layers,
        vision=VISION_LINEARS if towers else (),
        audio=towers,
    )
    return random_parameters(abstract, seed)


def random_tokens(model: Inkling, *shape: int, seed: int = 0) -> np.ndarray:
    """Ordinary tokens: no placeholders."""
    return np.random.default_rng(seed).integers(0, 140, shape).astype(np.int32)


@jax.jit
def _definition(model: Inkling, tokens, media=None):
    hidden = model.hidden(tokens, media)
    depths = mtp_hidden(model, hidden, model.embedded(tokens, media)) if model.mtp else []
    return model.logits(hidden), [model.logits(x) for x in depths]


def definition(model: Inkling, tokens: np.ndarray, media=None) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits of the trunk [batch, seq, vocab] and of each depth [batch, seq - 1 - n, vocab], without any cache."""
    logits, depths = _definition(model, tokens, media)
    return np.asarray(logits), [np.asarray(x) for x in depths]


@functools.partial(jax.jit, donate_argnums=2, static_argnames="prompt")
def _run(model: Inkling, batch: Batch, cache, ahead, prompt: bool):
    hidden, cache = model.forward(batch, cache)
    if cache.drafts:
        tokens = jnp.concatenate([batch.tokens, ahead], axis=1)
        embeds = model.embedded(tokens, None)
        embeds = embeds.at[:, : hidden.shape[1]].set(model.embedded(batch.tokens, batch.media))
        if prompt:
            _, cache = prefill_depths(model, hidden, embeds, Step.of(batch), cache)
        cache = remember(cache, hidden, embeds[:, : hidden.shape[1]], batch.pages.slot, batch.starts, batch.lengths)
    return model.logits(hidden), cache


@functools.partial(jax.jit, donate_argnums=5)
def _draft(model: Inkling, tokens, lengths, active, pages, cache):
    return draft(model, tokens, lengths, active, pages, cache)


class CachedInkling:
    """A model with a cache of `rows` sequences; pages and slots are dealt out shuffled, and everything is poisoned."""

    def __init__(self, model: Inkling, rows: int, max_len: int, max_chunk: int, num_drafts: int = 0):
        self.model, self.num_drafts = model, num_drafts
        shape = CacheShape.for_sequences(model.config, rows, max_len, max_chunk, num_drafts)
        self.cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), make_cache(model.config, shape, model.dtype))
        deal = np.random.default_rng(7).permutation
        self.pages = PageTables(
            jnp.asarray(deal(shape.num_full_pages).reshape(rows, -1), jnp.int32),
            jnp.asarray(deal(shape.num_window_pages).reshape(rows, -1), jnp.int32),
            jnp.asarray(deal(rows), jnp.int32),
        )
        self.lengths = np.zeros(rows, np.int32)

    def __call__(self, tokens, lengths=None, ahead=None, media=None, prompt=True) -> np.ndarray:
        """Runs a chunk [rows, chunk], of which `lengths` [rows] are real, and keeps all of it: logits.

        `ahead` [rows, drafts] are the prompt's tokens after the chunk, for the depths.
        """
        lengths = np.full(len(tokens), tokens.shape[1], np.int32) if lengths is None else np.asarray(lengths, np.int32)
        if ahead is None:
            ahead = np.zeros((len(tokens), self.num_drafts), np.int32)
        batch = Batch(jnp.asarray(tokens), jnp.asarray(self.lengths.copy()), jnp.asarray(lengths), self.pages, media)
        logits, self.cache = _run(self.model, batch, self.cache, ahead, prompt)
        self.lengths += lengths
        return np.asarray(logits)

    def in_chunks(self, tokens: np.ndarray, chunks) -> np.ndarray:
        """Runs rows of equal length chunk by chunk, each with what follows it: logits of all of them."""
        out, start, padded = [], 0, np.pad(tokens, ((0, 0), (0, self.num_drafts)))
        for chunk in chunks:
            end = start + chunk
            out.append(self(tokens[:, start:end], ahead=padded[:, end : end + self.num_drafts]))
            start = end
        assert start == tokens.shape[1]
        return np.concatenate(out, axis=1)

    def draft(self, tokens, active=None) -> np.ndarray:
        """Drafts after the newest tokens [rows], which are not in the cache yet: [rows, drafts]."""
        active = np.ones(len(tokens), bool) if active is None else active
        drafts, self.cache = _draft(
            self.model, jnp.asarray(tokens), jnp.asarray(self.lengths.copy()), active, self.pages, self.cache
        )
        return np.asarray(drafts)
