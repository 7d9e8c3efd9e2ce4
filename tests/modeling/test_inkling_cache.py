"""Inkling's cached path against its definition: chunks, ragged rows, decode, slot reuse, prefix hits, rollback."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling import cache as cache_module
from modeling.cache import restore_conv, snapshot_conv
from modeling.layers import attention
from modeling.parameters import parameter_names
from tests.modeling.tiny import relative
from tests.modeling.tiny_inkling import CachedInkling, definition, random_tokens, tiny_inkling

MODEL = tiny_inkling()
TOKENS = random_tokens(MODEL, 3, 96)
TRUTH, TRUTH_DEPTHS = definition(MODEL, TOKENS)
BOUND = 1e-5


def split(total: int, sizes) -> list[int]:
    """Chunk lengths cycling through `sizes` that sum to `total`."""
    chunks = []
    while sum(chunks) < total:
        chunks.append(min(sizes[len(chunks) % len(sizes)], total - sum(chunks)))
    return chunks


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 96])
def test_sc03_any_chunk_size_equals_one_pass(size):
    cached = CachedInkling(MODEL, 3, 96, max_chunk=size)
    assert relative(cached.in_chunks(TOKENS, split(96, [size])), TRUTH) < BOUND


@settings(max_examples=6, deadline=None)
@given(sizes=st.lists(st.sampled_from([1, 2, 7, 16, 33]), min_size=1, max_size=4))
def test_mixed_chunks_equal_one_pass(sizes):
    cached = CachedInkling(MODEL, 3, 96, max_chunk=33)  # one shape of cache, so that five programs serve all
    assert relative(cached.in_chunks(TOKENS, split(96, sizes)), TRUTH) < BOUND


@pytest.mark.parametrize("page", [8, 32])
def test_page_sizes_do_not_matter(page, monkeypatch):
    for module in (cache_module, attention):
        monkeypatch.setattr(module, "PAGE_SIZE", page)
    jax.clear_caches()  # programs of another page size have the same arguments
    cached = CachedInkling(MODEL, 3, 96, max_chunk=16)
    assert relative(cached.in_chunks(TOKENS, [16] * 6), TRUTH) < BOUND
    jax.clear_caches()


@functools.cache
def long_truth() -> np.ndarray:
    return definition(MODEL, random_tokens(MODEL, 1, 1441, seed=4))[0]


@pytest.mark.parametrize("length", [253, 361, 505, 541, 721, 1009, 1441])
def test_at12_chunks_of_512(length):
    tokens = random_tokens(MODEL, 1, 1441, seed=4)
    truth = long_truth()
    cached, out = CachedInkling(MODEL, 1, 1441, max_chunk=512), []
    for start in range(0, length, 512):
        real = min(512, length - start)
        chunk = np.zeros((1, 512), np.int32)
        chunk[:, :real] = tokens[:, start : start + real]
        out.append(cached(chunk, [real])[:, :real])
    assert relative(np.concatenate(out, axis=1), truth[:, :length]) < BOUND


def test_at08_decode_equals_prefill_of_one_more_for_ragged_rows():
    cached = CachedInkling(MODEL, 3, 96, max_chunk=16)
    lengths = np.array([3, 16, 9])
    cached(TOKENS[:, :16], lengths)
    for _ in range(30):
        now = cached.lengths.copy()
        logits = cached(np.stack([TOKENS[row, n : n + 1] for row, n in enumerate(now)]), prompt=False)
        for row, n in enumerate(now):
            assert relative(logits[row, 0], TRUTH[row, n]) < BOUND


@pytest.mark.parametrize("lengths", [(1, 3, 9), (3, 0, 12), (12, 1, 1)])
def test_sc05_padding_never_enters_a_window(lengths):
    """Ragged rows, then one step more each: every row equals its own run."""
    cached = CachedInkling(MODEL, 3, 96, max_chunk=12)
    first = cached(TOKENS[:, :12], lengths)
    second = cached(np.stack([TOKENS[row, n : n + 12] for row, n in enumerate(lengths)]))
    for row, n in enumerate(lengths):
        got = np.concatenate([first[row, :n], second[row]])
        assert relative(got, TRUTH[row, : n + 12]) < BOUND


def test_a_slot_that_changes_hands_needs_no_clearing():
    cached = CachedInkling(MODEL, 3, 96, max_chunk=32)
    cached.in_chunks(TOKENS[:, :64], [32, 32])
    cached.lengths[:] = 0
    again = cached.in_chunks(TOKENS[::-1], [32, 32, 32])
    assert relative(again, TRUTH[::-1]) < BOUND


@pytest.mark.parametrize("shared", [64, 128])
def test_sc01_a_prefix_hit_restores_everything(shared):
    """A second sequence takes over pages and the convolutions' state at a page boundary, and goes on its own way."""
    tokens = random_tokens(MODEL, 1, 160, seed=5)
    other = tokens.copy()
    other[:, shared:] = random_tokens(MODEL, 1, 160 - shared, seed=6)
    cached = CachedInkling(MODEL, 2, 160, max_chunk=64)
    both = np.concatenate([tokens, tokens])
    for start in range(0, shared, 64):
        cached(both[:, start : start + 64], [64, 0])  # row 1 is idle
    slots = cached.pages.slot
    snapshot = snapshot_conv(cached.cache, slots[0], jnp.int32(shared), taps=MODEL.config.conv_kernel_size - 1)
    cached(both[:, shared : shared + 32], [32, 0])  # row 0 goes on, and overwrites its rings
    # Row 1: the shared pages are row 0's, the rest its own; the window's pages are copied, as its ring is its own.
    full = cached.pages.full.at[1, : shared // 64].set(cached.pages.full[0, : shared // 64])
    window = cached.pages.window
    for page in range(shared // 64):
        source, target = (window[row, page % window.shape[1]] for row in (0, 1))
        layers = [
            layer._replace(k=layer.k.at[target].set(layer.k[source]), v=layer.v.at[target].set(layer.v[source]))
            if kind == "sliding_attention"
            else layer
            for layer, kind in zip(cached.cache.layers, MODEL.config.layer_types, strict=True)
        ]
        cached.cache = cached.cache._replace(layers=tuple(layers))
    cached.cache = restore_conv(cached.cache, slots[1], jnp.int32(shared), snapshot)
    cached.pages = cached.pages._replace(full=full)
    cached.lengths[:] = (shared + 32, shared)
    rest = other[:, shared:160][:, :32]
    logits = cached(np.concatenate([rest, rest]), [0, 32])
    truth, _ = definition(MODEL, other)
    assert relative(logits[1], truth[0, shared : shared + 32]) < BOUND


@pytest.mark.parametrize("drafts", [3, 8])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_sp04_rollback_after_any_number_of_accepted_drafts(drafts, data):
    """Steps of K + 1 rows of which a + 1 stay, for each row its own a: KV, convolutions and logits are a cold run's."""
    cached = CachedInkling(MODEL, 3, 96, max_chunk=8, num_drafts=drafts)
    cached(TOKENS[:, :8], [8, 5, 1])
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for _ in range(8):
        accepted = np.array([data.draw(st.integers(0, drafts)) for _ in range(3)])
        rows = np.stack([TOKENS[row, n : n + drafts + 1] for row, n in enumerate(cached.lengths)])
        for row, a in enumerate(accepted):
            rows[row, a + 1 :] = rng.integers(0, 140, drafts - a)  # rejected ones
        before = cached.lengths.copy()
        logits = cached(rows, prompt=False)
        cached.lengths = before + accepted.astype(np.int32) + 1
        for row, a in enumerate(accepted):
            assert relative(logits[row, : a + 1], TRUTH[row, before[row] : before[row] + a + 1]) < BOUND


def greedy_chain(model, tokens: np.ndarray, depths: int) -> list[int]:
    """Drafts after `tokens` [seq], the newest included, by the definition alone."""
    drafts: list[int] = []
    for depth in range(depths):
        row = np.zeros((1, 100), np.int32)  # what follows is not seen, so that one length serves all
        row[0, : len(tokens) + depth] = [*tokens, *drafts]
        drafts.append(int(definition(model, row)[1][depth][0, len(tokens) - 2].argmax()))
    return drafts


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_sp01_drafts_after_any_rejections_are_a_cold_chains(data):
    """What rejected drafts left in the depths' caches is always run again: drafts are the definition's whatever was
    accepted before, and the first depth's do not depend on the draft length."""
    long, short = (CachedInkling(MODEL, 1, 96, max_chunk=8, num_drafts=k) for k in (3, 1))
    start = data.draw(st.sampled_from([1, 2, 5, 8]))
    for one in (long, short):
        one(TOKENS[:1, :8], [start], ahead=TOKENS[:1, 8 : 8 + one.num_drafts])
    sequence = TOKENS[0, : start + 1].tolist()  # the last one is the newest, in no cache yet
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for _ in range(6):
        drafts = long.draft(sequence[-1:])[0].tolist()
        if len(sequence) > 1:
            assert drafts == greedy_chain(MODEL, np.array(sequence), 3)
        while short.lengths[0] < long.lengths[0]:
            length = int(short.lengths[0])
            draft = short.draft(sequence[length : length + 1])[0].tolist()
            short(np.array([[sequence[length], *draft]], np.int32), prompt=False)
            accepted = length + 1 < long.lengths[0] and draft[0] == sequence[length + 1]
            short.lengths[0] = length + 1 + accepted
        assert short.draft(sequence[-1:])[0, 0] == drafts[0]
        accepted = data.draw(st.integers(0, 3))
        long(np.array([[sequence[-1], *drafts]], np.int32), prompt=False)
        long.lengths[0] = len(sequence) + accepted
        sequence += [*drafts[:accepted], int(rng.integers(0, 140))]


@pytest.mark.parametrize("chunks", [[40], [7] * 5 + [5], [1] * 40, [39, 1], [16, 24]])
def test_drafts_after_a_prompt_do_not_depend_on_its_chunks(chunks):
    cached = CachedInkling(MODEL, 1, 96, max_chunk=max(chunks), num_drafts=3)
    cached.in_chunks(TOKENS[:1, :40], chunks)
    assert cached.draft(TOKENS[:1, 40])[0].tolist() == greedy_chain(MODEL, TOKENS[0, :41], 3)


def test_sp14_each_draft_is_made_by_its_own_depth():
    """Another second depth leaves the first draft alone and changes the second."""
    names, other = parameter_names(MODEL), jax.tree.leaves(tiny_inkling(seed=3))
    leaves, treedef = jax.tree.flatten(MODEL)
    mixed = [b if name.startswith("mtp.layers.1.") else a for name, a, b in zip(names, leaves, other, strict=True)]
    drafts = []
    for model in (MODEL, jax.tree.unflatten(treedef, mixed)):
        cached = CachedInkling(model, 1, 96, max_chunk=40, num_drafts=3)
        cached.in_chunks(TOKENS[:1, :40], [40])
        drafts.append(cached.draft(TOKENS[:1, 40])[0].tolist())
    assert drafts[0][0] == drafts[1][0]
    assert drafts[0][1] != drafts[1][1]
