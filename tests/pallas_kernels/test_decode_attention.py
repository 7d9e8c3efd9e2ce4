"""Decode attention: the kernels against the definition, the definition against the model."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling.cache import LayerCache, write_pages
from modeling.layers.attention import paged_attention
from modeling.layers.norm import rms_norm
from modeling.layers.rope import apply_rope
from pallas_kernels.decode_attention import Schedule, decode_attention, default_schedule, new_counters, supports
from pallas_kernels.decode_attention.schedule import COUNTERS, MERGED_PARTS, merge_groups
from pallas_kernels.decode_attention.shapes import FLINT_FULL, FLINT_SLIDING, FLINT_TINY_SLIDING
from pallas_kernels.decode_attention.triton import attention
from tests.pallas_kernels.decode_attention_cases import Layer, assert_close, draw

# The same cases run on the GPU where there is one; it takes bfloat16 alone.
INTERPRET = jax.default_backend() != "gpu"
DTYPE = jnp.float32 if INTERPRET else jnp.bfloat16

FULL = Layer(schedule=Schedule(3))
SLIDING = Layer(kv_heads=1, head_dim=32, group=4, entries=4, window=130, rotary=True)
LAYERS = [
    FULL,
    SLIDING,
    Layer(kv_heads=1, head_dim=64, group=2, entries=3, window=65, rotary=True, schedule=Schedule(2, 16, num_stages=2)),
    Layer(kv_heads=3, head_dim=32, group=1, schedule=Schedule(2, 128, num_warps=8, num_stages=3)),
    Layer(kv_heads=1, head_dim=128, group=4, entries=2, window=1, rotary=True, schedule=Schedule(1)),
    Layer(kv_heads=2, head_dim=64, group=8, rotary=True, schedule=Schedule(40, 32)),
]
BORDERS = [0, 1, 63, 64, 65, 127, 128, 300]


@functools.partial(jax.jit, static_argnames=("layer", "implementation"))
def run(*args, layer, implementation):
    return decode_attention(*args, **layer.static(), implementation=implementation, interpret=INTERPRET)


def check(layer, args, dtype=DTYPE):
    got, want = (run(*args, layer=layer, implementation=name) for name in ("triton", "reference"))
    assert not np.isnan(np.asarray(got[0], np.float32)).any()
    assert_close(got, want, dtype)
    return got


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.group}x{layer.head_dim}-{layer.window}")
def test_kernels_are_the_reference_at_the_borders_of_pages(layer):
    check(layer, draw(layer, BORDERS, dtype=DTYPE))


@pytest.mark.parametrize("layer", [FULL, SLIDING], ids=["full", "sliding"])
def test_kernels_are_the_reference_in_bfloat16(layer):
    check(layer, draw(layer, BORDERS, dtype=jnp.bfloat16), jnp.bfloat16)


@pytest.mark.parametrize("entries", [4, 33])
def test_kernels_are_the_reference_at_the_borders_of_a_window_and_of_a_table(entries):
    layer = dataclasses.replace(SLIDING, entries=entries)
    window, ring = layer.window, 64 * entries
    positions = [window - 2, window - 1, window, window + 1, ring - 1, ring, ring + 129, 3 * ring + 64]
    check(layer, draw(layer, positions, seed=1, dtype=DTYPE))


@pytest.mark.parametrize("layer", [FULL, SLIDING], ids=["full", "sliding"])
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_kernels_are_the_reference_for_any_rows(layer, data):
    """Any lengths, pages missing, rows idle."""
    last = layer.entries * 64 - 1 if layer.window is None else 100_000
    positions = data.draw(st.lists(st.integers(0, last), min_size=8, max_size=8))
    valid = data.draw(st.lists(st.booleans(), min_size=8, max_size=8))
    missing, seed = data.draw(st.sampled_from([0.0, 0.3, 1.0])), data.draw(st.integers(0, 2**32))
    check(layer, draw(layer, positions, seed, DTYPE, valid, missing))


def test_idle_rows_write_nothing_and_give_zero():
    valid = np.array([1, 0, 1, 0, 0, 1, 0, 0], np.int32)
    positions = np.where(valid, BORDERS, [-1, -(2**31), 0, 2**31 - 1, 400, 0, -64, -65])
    args = draw(FULL, positions, dtype=DTYPE, valid=valid)
    out, *pools, _ = check(FULL, args)
    assert (np.asarray(out, np.float32)[valid == 0] == 0).all()
    for before, after in zip(args[5:7], pools, strict=True):
        written = ~np.isnan(np.asarray(after, np.float32)) & np.isnan(np.asarray(before, np.float32))
        assert written.sum() == valid.sum() * FULL.kv_heads * FULL.head_dim


def test_a_token_without_a_page_is_not_seen():
    args = list(draw(FULL, BORDERS, dtype=DTYPE))
    args[7] = args[7].at[0, 0].set(args[5].shape[0]).at[3, 1].set(-1)
    out, *_ = check(FULL, args)
    seen = (np.asarray(out, np.float32) != 0).any(axis=1)
    assert seen.tolist() == [False] + 7 * [True]  # position 0 sees itself alone, position 64 the page before too


def test_a_sink_far_above_the_scores_takes_all():
    args = list(draw(FULL, BORDERS, dtype=DTYPE))
    args[4] = jnp.full(FULL.heads, 1e4)
    out, *_ = check(FULL, args)
    assert (np.asarray(out, np.float32) == 0).all()


def parts(layer, args):
    """The kernel's output, and what it left in memory for the parts' attention."""
    out, *_, partial = attention(*args, window=layer.window, eps=1e-6, schedule=layer.schedule, interpret=INTERPRET)
    return out, partial


@pytest.mark.skipif(not INTERPRET, reason="a GPU's memory holds anything")
@pytest.mark.parametrize("splits", [9, 40])
def test_parts_without_keys_are_neither_written_nor_read(splits):
    """More splits than tiles, merged at once or in groups. Interpreted, what was never written is NaN."""
    layer = dataclasses.replace(FULL, schedule=Schedule(splits, 16))
    out, partial = parts(layer, draw(layer, [0, 5, 100, 380]))
    assert np.isfinite(out).all()
    groups, size = merge_groups(splits + 1)
    counts = np.minimum(np.array([1, 2, 8, 25]), splits + 1)[:, None]
    written = np.arange(splits + 1) < counts
    if groups > 1:
        written = np.concatenate([written, np.arange(groups) < -(-counts // size)], axis=1)
    assert (
        partial.o.shape == (*written.shape, layer.heads, layer.head_dim) and partial.lse.shape == partial.o.shape[:-1]
    )
    for part in partial:
        nan = np.isnan(part).reshape(*written.shape, -1)
        np.testing.assert_array_equal(nan.any(axis=-1), ~written)
        np.testing.assert_array_equal(nan.all(axis=-1), ~written)


def test_merge_groups_hold_every_part_and_have_counters():
    for parts in range(1, 600):
        groups, size = merge_groups(parts)
        assert groups * size >= parts > (groups - 1) * size
        assert groups < COUNTERS and (parts > 256 or size <= MERGED_PARTS)
    assert [merge_groups(parts) for parts in (10, 16, 17, 66)] == [(1, 10), (1, 16), (5, 4), (9, 8)]


def test_counters_serve_launch_after_launch():
    """Layers of both kinds and other lengths, one after the other on the same counters."""
    rng = np.random.default_rng(3)
    layers = [
        FULL,
        dataclasses.replace(FULL, window=130, rotary=True),
        dataclasses.replace(FULL, schedule=Schedule(40)),
    ]
    cases = [(layer, draw(layer, rng.integers(0, 380, 3), seed, DTYPE)) for seed, layer in enumerate(layers * 2)]
    counters = new_counters(3, FULL.kv_heads)
    for layer, (*args, _) in cases:
        got = run(*args, counters, layer=layer, implementation="triton")
        assert_close(got, run(*args, counters, layer=layer, implementation="reference"), DTYPE)
        counters = got[-1]


def test_weights_are_summed_before_they_are_rounded():
    """One key that scores high and a hundred alike, whose weight bfloat16 cannot hold."""
    layer = Layer(kv_heads=1, entries=2, schedule=Schedule(1))
    args = list(draw(layer, [101], dtype=jnp.bfloat16))
    args[0], args[1] = jnp.ones_like(args[0]), jnp.ones_like(args[1])  # queries of ones, exactly
    alike = np.random.default_rng(0).standard_normal(layer.head_dim).astype(jnp.bfloat16)
    high = (alike.astype(np.float32) + 0.22).astype(jnp.bfloat16)
    args[5] = jnp.broadcast_to(alike, args[5].shape).at[args[7][0, 0], 0, 0].set(high)
    _, partial = parts(layer, args)
    top, rest = (x.astype(np.float64).sum() * layer.head_dim**-0.5 for x in (high, alike))
    weight = np.exp(rest - top)
    rounded = float(jnp.bfloat16(weight))
    assert abs(rounded / weight - 1) > 1e-3
    np.testing.assert_allclose(np.exp2(partial.lse[0, 1] - top / np.log(2)), 1 + 100 * weight, rtol=1e-4)


@pytest.mark.parametrize("layer", [FULL, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_reference_is_the_models_attention(layer, dtype):
    args = draw(layer, BORDERS, dtype=dtype, valid=[1, 1, 0, 1, 1, 1, 1, 1], missing=0.2)
    qkv, q_norm, k_norm, rope, sinks, k_pool, v_pool, table, positions, valid, counters = args
    q, k, v = jnp.split(qkv.reshape(8, 1, -1, layer.head_dim), (layer.heads, layer.heads + layer.kv_heads), axis=2)
    q, k = (rms_norm(x, w, 1e-6, dtype) for x, w in ((q, q_norm), (k, k_norm)))
    if rope is not None:
        q, k = (apply_rope(x, *(angle[:, None] for angle in rope)) for x in (q, k))
    positions, valid = positions[:, None], valid[:, None].astype(bool)
    cache = write_pages(LayerCache(k_pool, v_pool), k, v, table, positions, valid)
    out = paged_attention(q, cache, sinks, table, positions, valid, layer.window)
    got = run(*args, layer=layer, implementation="reference")
    assert_close(got, (out.reshape(8, -1), cache.k, cache.v, counters), dtype)


def test_what_the_kernels_do_not_take_is_refused():
    assert supports(32, 4, 128) and supports(8, 8, 32)
    assert not supports(32, 2, 128) and not supports(30, 4, 128) and not supports(32, 4, 96)
    assert not supports(32, 4, 128, page_size=16)
    for layer, message in [(Layer(group=16), "heads a kv head"), (Layer(head_dim=16), "head_dim")]:
        with pytest.raises(ValueError, match=message):
            run(*draw(layer, [3]), layer=layer, implementation="triton")
    args = draw(FULL, [3, 4])
    with pytest.raises(ValueError, match="bfloat16, not float32"):
        decode_attention(*args, **FULL.static())
    with pytest.raises(ValueError, match="window of 0"):
        decode_attention(*args, window=0, eps=1e-6)
    with pytest.raises(ValueError, match="implementation"):
        decode_attention(*args, **FULL.static(), implementation="mosaic")
    for i, name in [
        (0, "qkv"),
        (1, "q_norm"),
        (2, "k_norm"),
        (4, "sinks"),
        (6, "v_pool"),
        (8, "positions"),
        (9, "valid"),
        (10, "counters"),
    ]:
        wrong = [*args[:i], args[i][..., :-1], *args[i + 1 :]]
        with pytest.raises(ValueError, match=name):
            decode_attention(*wrong, **FULL.static())


@pytest.mark.parametrize("batch", [1, 2, 8, 64])
@pytest.mark.parametrize("shape", [FLINT_FULL, FLINT_SLIDING], ids=["full", "sliding"])
def test_default_schedule_fills_the_gpu_once(shape, batch):
    schedule = default_schedule(batch, shape.num_kv_heads, shape.entries(262_144), shape.window)
    programs = batch * shape.num_kv_heads * schedule.num_splits
    if shape.window is None:
        assert 256 <= programs <= 396
    else:
        assert schedule.num_splits == {1: 9, 2: 9, 8: 9, 64: 2}[batch]


def avals(shape, batch, context):
    """Abstract arguments, and the donated ones' places."""
    entries, d = shape.entries(context), shape.head_dim
    pool = jax.ShapeDtypeStruct((batch * entries, shape.num_kv_heads, 64, d), jnp.bfloat16)
    row, norm = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((d,), jnp.bfloat16)
    qkv = jax.ShapeDtypeStruct((batch, (shape.num_heads + 2 * shape.num_kv_heads) * d), jnp.bfloat16)
    angle = jax.ShapeDtypeStruct((batch, d // 2), jnp.float32)
    sinks, table = (
        jax.ShapeDtypeStruct((shape.num_heads,), jnp.float32),
        jax.ShapeDtypeStruct((batch, entries), jnp.int32),
    )
    rope = (angle, angle) if shape.rotary else None
    valid = jax.ShapeDtypeStruct((batch,), jnp.bool)
    counters = jax.eval_shape(lambda: new_counters(batch, shape.num_kv_heads))
    return (qkv, norm, norm, rope, sinks, pool, pool, table, row, valid, counters), (5, 6, 10)


@pytest.mark.parametrize(
    "shape, batch, context",
    [(FLINT_FULL, 1, 262_144), (FLINT_FULL, 8, 102_400), (FLINT_SLIDING, 1, 262_144), (FLINT_TINY_SLIDING, 3, 512)],
    ids=["full-1", "full-8", "sliding-1", "tiny-3"],
)
def test_one_kernel_on_the_h200(shape, batch, context, compiled):
    """In place, without spills, keys and values by 16 bytes past the registers, products on the matrix units."""
    args, donated = avals(shape, batch, context)
    fn = functools.partial(decode_attention, window=shape.window, eps=1e-6)
    report = compiled("h200", fn, *args, donate=donated)
    assert report.names == {"decode_attention": 1}
    assert (report.kernels, report.copies, report.spills, report.local_memory) == (1, 0, 0, 0)
    ptx = report.code["decode_attention"].ptx
    assert "cp.async.cg.shared.global" in ptx and "cp.async.ca" not in ptx
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx
    # Two programs fit on a processor.
    assert report.code["decode_attention"].registers <= 128


def test_the_last_program_sees_what_the_others_stored(compiled):
    """All threads store, then meet, then one counts; only the parts that exist are read, and after that."""
    args, donated = avals(FLINT_SLIDING, 1, 262_144)
    report = compiled("h200", functools.partial(decode_attention, window=513, eps=1e-6), *args, donate=donated)
    before, counting = report.code["decode_attention"].ptx.split("atom.global.gpu.acq_rel.add")
    code = [line for line in before.splitlines() if re.search(r"st\.global|bar\.sync", line)]
    assert "bar.sync" in code[-1] and any("st.global" in line for line in code)
    after = [line for line in counting.splitlines() if re.search(r"ld\.global|bar\.sync", line)]
    loads = sum("ld.global.v4" in line for line in after)
    assert "bar.sync" in after[0] and loads == 8 * 128 * 10 // (4 * 128)  # 16 bytes a thread
