"""The fused decode step against the plain one: whole chains with the kernels' definitions, single layers with the
kernels themselves, which take long to compile for a CPU. Where there is a GPU, both run there."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import Cached, random_tokens, relative, tiny_flint

import modeling
from modeling.flint.config import FULL, SLIDING
from modeling.flint.decode import Kernels
from modeling.kernels import with_kernels
from serve.text.chat_template import encode_chat
from serve.text.load import load_tokenizer

GPU = jax.default_backend() == "gpu"
REFERENCE, KERNELS = Kernels("reference"), Kernels(interpret=not GPU)
EMBEDDED = Path(__file__).parents[2] / "checkpoints/flint-tiny"
# On both sides of page borders; the rings of sliding layers hold 3 pages, so the last rows have come around.
LENGTHS = [1, 8, 63, 64, 65, 191, 200]
IDLE = 2  # the row that takes no part in some steps
PAGE = 64
ONE_OF_EACH = dict(num_hidden_layers=2, layer_types=(FULL, SLIDING), sparse_layers=(False, True))


def filled(model, lengths) -> Cached:
    """A cache in which each row has that many tokens, random ones; all else is poison."""
    cached, rng = Cached(model, len(lengths), max_len=320, max_chunk=64), np.random.default_rng(3)
    layers = []
    for kind, layer in zip(model.config.layer_types, cached.cache.layers, strict=True):
        window = model.config.sliding_window if kind == SLIDING else None
        table = np.asarray(cached.pages.window if kind == SLIDING else cached.pages.full)
        k, v = (np.array(pool.astype(jnp.float32)) for pool in (layer.k, layer.v))
        for row, length in enumerate(lengths):
            positions = np.arange(max(0, length - (window - 1)) if window else 0, length)
            at = (table[row, positions // PAGE % table.shape[1]], slice(None), positions % PAGE)
            for pool in (k, v):
                pool[at] = rng.standard_normal(pool[at].shape)
        exact = (jnp.asarray(pool, jnp.bfloat16).astype(model.dtype) for pool in (k, v))
        layers.append(layer._replace(**dict(zip("kv", exact, strict=True))))
    cached.cache = cached.cache._replace(layers=tuple(layers))
    cached.lengths = np.array(lengths, np.int32)
    return cached


def greedy(model, kernels, steps, lengths=LENGTHS, tokens=None):
    """Decodes: tokens and logits [steps, rows, ...] and the cache. Given `tokens`, it goes along these instead."""
    cached = filled(model, lengths)
    cached.model = with_kernels(model, kernels)
    newest = np.arange(len(lengths), dtype=np.int32)
    chosen, logits = [], []
    for step in range(steps):
        active = np.ones(len(lengths), np.int32)
        active[IDLE] = step % 2
        out = cached(newest[:, None], active)[:, 0]
        assert not np.isnan(out).any()
        logits.append(out * active[:, None])  # an idle row's are meaningless
        chosen.append(logits[-1].argmax(-1))
        newest = np.where(active > 0, chosen[-1] if tokens is None else tokens[step], newest).astype(np.int32)
    return np.array(chosen), np.array(logits), cached.cache


def errors(logits, truth):
    """Relative error of each row and step that took part."""
    norm = np.linalg.norm(truth, axis=-1)
    return np.linalg.norm(logits - truth, axis=-1)[norm > 0] / norm[norm > 0]


@pytest.mark.parametrize("weight_format, router_dtype", [("bf16", "float32"), ("nvfp4", "bfloat16")])
def test_steps_are_the_plain_ones(weight_format, router_dtype):
    options = dict(weight_format=weight_format, router_dtype=router_dtype, **ONE_OF_EACH)
    model = tiny_flint(dtype=jnp.bfloat16, **options)
    tokens, plain, plain_cache = greedy(model, None, 6)
    found, logits, cache = greedy(model, REFERENCE, 6)
    np.testing.assert_array_equal(found, tokens)
    _, truth, _ = greedy(tiny_flint(dtype=jnp.float32, **options), None, 6, tokens=tokens)
    assert np.median(errors(logits, truth)) <= 1.25 * np.median(errors(plain, truth))
    assert relative(logits, plain) < relative(plain, truth)  # closer to one another than roundings are to no roundings
    for pool, expected in zip(jax.tree.leaves(cache), jax.tree.leaves(plain_cache), strict=True):
        pool, expected = (np.asarray(array.astype(jnp.float32)) for array in (pool, expected))
        np.testing.assert_array_equal(np.isnan(pool), np.isnan(expected))  # nothing else was written
        assert relative(np.nan_to_num(pool), np.nan_to_num(expected)) < 1e-2


def test_steps_without_a_window_are_the_plain_ones():
    model = tiny_flint(
        dtype=jnp.bfloat16, sliding_window=None, num_key_value_heads=1, norm_topk_prob=False, **ONE_OF_EACH
    )
    tokens, plain, _ = greedy(model, None, 3)
    found, logits, _ = greedy(model, REFERENCE, 3)
    np.testing.assert_array_equal(found, tokens)
    assert relative(logits, plain) < 1e-2


def test_a_layer_of_kernels_is_the_plain_one():
    """One layer alone: random layers in a row would turn one rounding into another expert."""
    options = dict(weight_format="nvfp4", num_hidden_layers=1, layer_types=(SLIDING,), sparse_layers=(True,))
    model, lengths = tiny_flint(dtype=jnp.bfloat16, **options), [70, 200, 3]
    _, plain, _ = greedy(model, None, 1, lengths)
    _, logits, _ = greedy(model, KERNELS, 1, lengths)
    _, truth, _ = greedy(tiny_flint(dtype=jnp.float32, **options), None, 1, lengths)
    assert errors(logits, truth).max() <= 1.25 * errors(plain, truth).max()


@pytest.mark.parametrize("kernels", [REFERENCE, KERNELS], ids=["definitions", "kernels"])
def test_the_embedded_checkpoint_gives_its_answers(kernels):
    """Prompts are fed to the decode step as well, token by token, and then its own choices."""
    model, tokenizer = modeling.load(EMBEDDED, dtype="bfloat16", progress=False), load_tokenizer(EMBEDDED)
    examples = [json.loads(line) for line in (EMBEDDED / "examples.jsonl").read_text().splitlines()[:4]]
    prompts = [encode_chat(tokenizer, e["messages"], enable_thinking=e["enable_thinking"]) for e in examples]
    cached = Cached(with_kernels(model, kernels), len(prompts), max_len=64, max_chunk=1)
    answers = [[] for _ in prompts]
    for step in range(63):
        tokens = [(prompt + answer)[step] for prompt, answer in zip(prompts, answers, strict=True)]
        chosen = cached(np.array(tokens, np.int32)[:, None])[:, 0].argmax(-1).tolist()
        for prompt, answer, token in zip(prompts, answers, chosen, strict=True):
            if step >= len(prompt) - 1:
                answer.append(token)
    for example, answer in zip(examples, answers, strict=True):
        expected = f"{example['reasoning']}</think>{example['content']}<|user|>"
        assert tokenizer.decode(answer, skip_special_tokens=False).startswith(expected)


def test_more_than_eight_rows_and_chunks_run_plain():
    """The kernels would refuse these; `interpret` is off, and there may be no GPU either."""
    model = with_kernels(tiny_flint(dtype=jnp.bfloat16, num_hidden_layers=1), Kernels())
    tokens = random_tokens(model, 9, 3)
    cached = Cached(model, 9, max_len=64, max_chunk=64)
    assert np.isfinite(cached(tokens[:, :2])).all()
    assert np.isfinite(cached(tokens[:, 2:])).all()


def test_the_way_to_run_survives_flattening():
    model = tiny_flint(dtype=jnp.bfloat16, num_hidden_layers=1)
    leaves, treedef = jax.tree.flatten(with_kernels(model, KERNELS))
    assert jax.tree.unflatten(treedef, leaves).decode_kernels == KERNELS
    assert treedef != jax.tree.structure(model) == jax.tree.structure(with_kernels(model, None))
    assert model.decode_kernels is None
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(model), strict=True))
