"""The whole model: published sizes, cache paths against the definition, positions."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import Cached, dense_logits, random_tokens, relative, tiny_config, tiny_flint

from modeling.batch import Batch
from modeling.cache import CacheShape, PageTables, make_cache
from modeling.flint.config import FULL, SLIDING, FlintConfig
from modeling.flint.model import Flint
from modeling.layers.attention import dense_attention
from modeling.layers.rope import rope_angles
from modeling.parameters import parameter_names


def count(model, part="") -> int:
    sizes = zip(parameter_names(model), jax.tree.leaves(model), strict=True)
    return sum(math.prod(leaf.shape) for name, leaf in sizes if part in name)


def test_full_size_bf16_parameter_counts():
    model = Flint.abstract(FlintConfig())
    assert count(model) == 39_785_287_456
    assert count(model, ".mlp.experts.") == 37_849_399_296
    assert count(model, ".shared_expert.") == 295_698_432
    assert count(model, "mlp.gate") - count(model, "mlp.gate_proj") == 24_641_536
    assert count(model, "sinks") == 1_568
    assert count(model, "lm_head") == count(model, "embed_tokens") == 307_494_912


def test_full_size_nvfp4_bytes():
    model = Flint.abstract(FlintConfig(), weight_format="nvfp4")
    packed = [
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for name, leaf in zip(parameter_names(model), jax.tree.leaves(model), strict=True)
        if name.endswith(("codes", "scales"))
    ]
    assert sum(packed) == 22_192_275_456  # as many bytes as on disk
    assert count(model, "global_scale") == 36_440


@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4"])
def test_full_size_step_has_the_right_shapes(weight_format):
    config = FlintConfig()
    model = Flint.abstract(config, weight_format=weight_format)
    shape = CacheShape.for_sequences(config, 2, 262_144, 512)
    cache = jax.eval_shape(lambda: make_cache(config, shape, jnp.bfloat16))
    ints = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32)  # noqa: E731
    pages = (ints(2, shape.max_pages), ints(2, shape.ring), ints(2))
    batch = Batch(ints(2, 1), ints(2), ints(2), PageTables(*pages))

    def step(model, batch, cache):
        hidden, cache = model.forward(batch, cache)
        return model.logits(hidden), cache

    logits, new_cache = jax.eval_shape(step, model, batch, cache)
    assert (logits.shape, logits.dtype) == ((2, 1, 150_144), jnp.float32)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), new_cache) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), cache
    )


def test_kv_bytes_a_token_and_a_window():
    config = FlintConfig()

    def size(max_len):
        return CacheShape.for_sequences(config, 1, max_len, max_chunk=512).bytes(config, jnp.bfloat16)

    assert (size(200_000) - size(100_032)) / (200_000 - 100_032) == 28 * 1024
    window = window_bytes(config, 262_144)
    assert window == window_bytes(config, 100_000)  # bounded, whatever the length
    assert window == 35 * 2048 * 64 * 17  # 513 - 1 + 512 tokens, in 64-token pages, and one more


def window_bytes(config, max_len):
    shape = CacheShape.for_sequences(config, 1, max_len, max_chunk=512)
    return dataclasses.replace(shape, num_full_pages=0).bytes(config, jnp.bfloat16)


@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("chunks", [[200], [65, 65, 65, 5], [190] + [1] * 10])
def test_cached_chunks_equal_the_definition(weight_format, chunks):
    model = tiny_flint(weight_format=weight_format)
    tokens = random_tokens(model, 2, 200)
    cached = Cached(model, rows=2, max_len=256, max_chunk=max(chunks))
    assert relative(cached.in_chunks(tokens, chunks), dense_logits(model, tokens)) <= 1e-5


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_sc03_67_tokens_in_any_chunks(chunk):
    model = tiny_flint()
    tokens = random_tokens(model, 1, 67)
    chunks = [chunk] * (67 // chunk) + ([67 % chunk] if 67 % chunk else [])
    cached = Cached(model, rows=1, max_len=128, max_chunk=64)
    assert relative(cached.in_chunks(tokens, chunks), dense_logits(model, tokens)) <= 1e-5


def test_ragged_rows_equal_their_single_runs():
    model = tiny_flint()
    tokens = random_tokens(model, 3, 90)
    cached = Cached(model, rows=3, max_len=128, max_chunk=64)
    outs = [[], [], []]
    position = np.zeros(3, int)
    for lengths in ([1, 33, 0], [64, 0, 20], [3, 7, 64], [1, 1, 1]):
        chunk = np.zeros((3, max(lengths)), np.int32)
        for row, length in enumerate(lengths):
            chunk[row, :length] = tokens[row, position[row] : position[row] + length]
        logits = cached(chunk, lengths)
        for row, length in enumerate(lengths):
            outs[row].append(logits[row, :length])
            position[row] += length
    for row in range(3):
        alone = dense_logits(model, tokens[row : row + 1, : position[row]])[0]
        assert relative(np.concatenate(outs[row]), alone) <= 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        dict(sliding_window=1),
        dict(sliding_window=65, num_attention_heads=8, num_key_value_heads=8),
        dict(sliding_window=None),
        dict(num_key_value_heads=1, head_dim=16),
        dict(num_experts=32, num_experts_per_tok=8, norm_topk_prob=False),
        dict(layer_types=(SLIDING,) * 4),
        dict(layer_types=(FULL,) * 4, sparse_layers=(True,) * 4),
        dict(sparse_layers=(False,) * 4, rope_theta=500.0),
        dict(num_hidden_layers=1),
    ],
)
def test_other_shapes(changes):
    model = tiny_flint(**changes)
    tokens = random_tokens(model, 2, 150)
    cached = Cached(model, rows=2, max_len=192, max_chunk=100)
    assert relative(cached.in_chunks(tokens, [100, 49, 1]), dense_logits(model, tokens)) <= 1e-5


def test_at06_only_sliding_layers_use_positions():
    """Shifting every position by 1,000 changes nothing in a full layer; in a sliding one only the angle's rounding."""
    model = tiny_flint()
    positions = jnp.arange(20)[None]
    x, residual = model.embed(random_tokens(model, 1, 20))

    def run(layer, shift):
        def attend(q, k, v, sinks, window):
            return dense_attention(q, k, v, sinks, positions, window), None

        angles = rope_angles(positions + shift, model.config.head_dim, model.config.rope_theta)
        return layer(x, residual, angles, attend, valid=None)[0]

    for layer, kind in zip(model.layers, model.config.layer_types, strict=True):
        moved = relative(run(layer, 1000), run(layer, 0))
        if kind == FULL:
            assert moved == 0
        else:
            assert 0 < moved < 1e-3
            assert relative(run(layer, jnp.arange(20) % 3), run(layer, 0)) > 1e-2  # not merely ignored


def test_nope_permuting_the_past_of_a_full_layer_changes_nothing():
    def last(model, tokens):
        return dense_logits(model, tokens)[0, -1]

    full = tiny_flint(num_hidden_layers=1)
    sliding = tiny_flint(num_hidden_layers=1, layer_types=(SLIDING,), sliding_window=100)
    tokens = random_tokens(full, 1, 30)
    permuted = np.concatenate([np.random.default_rng(0).permutation(tokens[0, :-1]), tokens[0, -1:]])[None]
    assert relative(last(full, permuted), last(full, tokens)) <= 1e-6
    assert relative(last(sliding, permuted), last(sliding, tokens)) > 1e-3


def test_jx05_poisoned_padding_pages_do_not_change_logits():
    model = tiny_flint()
    tokens = random_tokens(model, 1, 70)
    outs = [
        Cached(model, rows=1, max_len=256, max_chunk=64, poison=poison).in_chunks(tokens, [64, 5, 1])
        for poison in (0.0, float("nan"))
    ]
    np.testing.assert_array_equal(outs[0], outs[1])


def test_the_cache_is_donated_and_memory_stays_flat_over_1000_tokens():
    model = tiny_flint(max_position_embeddings=2048)
    cached = Cached(model, rows=1, max_len=1100, max_chunk=64)
    tokens = random_tokens(model, 1, 1064)
    cached(tokens[:, :64])
    cached(tokens[:, 64:65])
    places = [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(cached.cache)]
    live = None
    for i in range(65, 1064):
        old = cached.cache
        cached(tokens[:, i : i + 1])
        assert all(pool.is_deleted() for pool in jax.tree.leaves(old))
        if i % 200 == 0:
            now = sum(array.nbytes for array in jax.live_arrays())
            live = live or now
            assert now == live
    # In place: the very same memory, not a copy that takes the old one's role.
    assert [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(cached.cache)] == places


def test_definition_is_differentiable():
    model = tiny_flint(num_hidden_layers=3)
    tokens = random_tokens(model, 2, 12)
    leaves, treedef = jax.tree.flatten(model)
    leaves = [leaf.astype(jnp.float32) for leaf in leaves]

    def loss(leaves):
        logits = jax.tree.unflatten(treedef, leaves)(tokens[:, :-1])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()

    grads = jax.jit(jax.grad(loss))(leaves)
    assert all(bool(jnp.isfinite(g).all()) for g in grads)
    moved = [name for name, g in zip(parameter_names(model), grads, strict=True) if float(jnp.abs(g).max()) > 0]
    assert len(moved) == len(leaves)


def test_layers_of_one_kind_are_traced_once():
    config = tiny_config(num_hidden_layers=48)
    model = Flint.abstract(config, dtype=jnp.float32)
    kinds = {jax.tree.structure(layer) for layer in model.layers}
    assert len(kinds) == 3  # full dense, full sparse, sliding sparse
