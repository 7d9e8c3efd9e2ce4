"""Attention against float64 numpy: windows, sinks, pages, poison."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modeling.cache import PAGE_SIZE, LayerCache, write_pages
from modeling.layers import attention
from modeling.layers.attention import Partial, dense_attention, finish, merge, paged_attention, partial_attention
from modeling.layers.rope import apply_rope, inverse_frequencies, rope_angles

PYTORCH_INV_FREQ = [
    0x3F800000, 0x3F5DAFD7, 0x3F3FF911, 0x3F263DE0, 0x3F0FF59A, 0x3EF953CF, 0x3ED7E89B, 0x3EBAF81B,
    0x3EA1E89B, 0x3E8C3504, 0x3E72D423, 0x3E5247ED, 0x3E361887, 0x3E1DB040, 0x3E088D77, 0x3DEC7FD6,
    0x3DCCCCCD, 0x3DB15978, 0x3D99940D, 0x3D84FE4D, 0x3D6655C2, 0x3D47763F, 0x3D2CBA15, 0x3D159348,
    0x3D0186E3, 0x3CE054D2, 0x3CC2434F, 0x3CA8398B, 0x3C91AD39, 0x3C7C4D33, 0x3C5A7BF2, 0x3C3D3311,
    0x3C23D70A, 0x3C0DE12D, 0x3BF5B9B0, 0x3BD4CA15, 0x3BB8449C, 0x3B9F91CC, 0x3B8A2E77, 0x3B6F520E,
    0x3B4F3E38, 0x3B33770F, 0x3B1B690D, 0x3B06946F, 0x3AE91528, 0x3AC9D75C, 0x3AAEC98E, 0x3A975C0E,
    0x3A83126F, 0x3A6301E2, 0x3A44948C, 0x3A2A3B44, 0x3A136A16, 0x39FF4FAC, 0x39DD1725, 0x39BF74D7,
    0x39A5CB60, 0x398F9272, 0x3978A815, 0x395753E4, 0x393A7753, 0x39217916, 0x390BD472, 0x38F22CE2,
]  # fmt: skip


def numpy_attention(q, k, v, sinks, window):
    """Softmax over [scores, sink] with the sink's column dropped; [tokens, heads, d] each, float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    tokens, heads, d = q.shape
    group = heads // k.shape[1]
    out = np.zeros_like(q)
    for i in range(tokens):
        first = 0 if window is None else max(0, i - window + 1)
        for h in range(heads):
            scores = k[first : i + 1, h // group] @ q[i, h] * d**-0.5
            both = np.append(scores, sinks[h])
            p = np.exp(both - both.max())
            out[i, h] = (p / p.sum())[:-1] @ v[first : i + 1, h // group]
    return out


def draw(tokens, heads=4, kv_heads=2, d=16, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((tokens, heads, d), (tokens, kv_heads, d), (tokens, kv_heads, d))
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return q, k, v, rng.standard_normal(heads).astype(np.float32)


def write_and_attend(cache, q, k, v, sinks, table, positions, window):
    """One chunk of a single row: [1, chunk, heads, d] each."""
    valid = jnp.ones(positions.shape, bool)
    cache = write_pages(cache, k, v, table, positions, valid)
    return paged_attention(q, cache, sinks, table, positions, valid, window), cache


jitted = jax.jit(write_and_attend, static_argnames="window")


def through_pages(q, k, v, sinks, window, chunks, poison=np.nan, run=jitted):
    """Runs a sequence chunk by chunk through a shuffled, poisoned cache."""
    num_pages = -(-len(q) // PAGE_SIZE) + 3
    table = np.random.default_rng(1).permutation(num_pages)[None].astype(np.int32)
    pool = jnp.full((num_pages, k.shape[1], PAGE_SIZE, k.shape[2]), poison, jnp.float32)
    cache, outs, start = LayerCache(pool, pool), [], 0
    for chunk in chunks:
        part = slice(start, start + chunk)
        positions = np.arange(start, start + chunk, dtype=np.int32)[None]
        out, cache = run(cache, q[None, part], k[None, part], v[None, part], sinks, table, positions, window=window)
        outs.append(out[0])
        start += chunk
    return np.concatenate(outs)


@pytest.mark.parametrize("window", [None, 1, 13, 64, 513])
def test_dense_attention_is_softmax_with_a_sink(window):
    q, k, v, sinks = draw(90)
    ours = dense_attention(q[None], k[None], v[None], sinks, jnp.arange(90)[None], window)[0]
    np.testing.assert_allclose(ours, numpy_attention(q, k, v, sinks, window), atol=2e-6)


def test_at01_window_of_513_sees_itself_and_512_back():
    tokens, window = 600, 513
    q, k, _, _ = draw(tokens, heads=1, kv_heads=1)
    v = np.ones_like(k)
    sinks = np.zeros(1, np.float32)  # one more logit of 0 beside scores of 0: output = seen / (seen + 1)
    q = np.zeros_like(q)
    expected = np.minimum(np.arange(tokens) + 1, window)
    for out in (
        dense_attention(q[None], k[None], v[None], sinks, jnp.arange(tokens)[None], window)[0],
        through_pages(q, k, v, sinks, window, [600]),
        through_pages(q, k, v, sinks, window, [500, 50, 50]),
        through_pages(q, k, v, sinks, window, [590] + [1] * 10),
    ):
        ratio = np.asarray(out)[:, 0, 0]
        np.testing.assert_allclose(ratio / (1 - ratio), expected, rtol=1e-3)


@pytest.mark.parametrize("window", [13, 513])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_at02_lengths_around_the_window(window, offset):
    for tokens in (window + offset, 2 * window + 7):
        q, k, v, sinks = draw(tokens, seed=tokens)
        expected = numpy_attention(q, k, v, sinks, window)
        np.testing.assert_allclose(through_pages(q, k, v, sinks, window, [tokens]), expected, atol=3e-6)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("sink", [8.0, -8.0, 200.0])
def test_at03_large_sinks(window, sink):
    q, k, v, _ = draw(70)
    sinks = np.full(4, sink, np.float32)
    expected = numpy_attention(q, k, v, sinks, window)
    np.testing.assert_allclose(through_pages(q, k, v, sinks, window, [64, 5, 1]), expected, atol=2e-6)
    ours = dense_attention(q[None], k[None], v[None], sinks, jnp.arange(70)[None], window)[0]
    np.testing.assert_allclose(ours, expected, atol=2e-6)


@pytest.mark.parametrize("keys", [1, 3, 513, 4096])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_at04_splits_count_the_sink_once(keys, splits):
    q, k, v, _ = draw(keys)
    sinks = np.full(4, 5.0, np.float32)
    expected = numpy_attention(q, k, v, sinks, None)[-1]
    query, scale = jnp.asarray(q[None, -1:]), q.shape[-1] ** -0.5
    keys_first, values_first = (jnp.asarray(x[None]).swapaxes(1, 2) for x in (k, v))
    part = None
    for piece in np.array_split(np.arange(max(keys, 1)), splits):  # some are empty when keys < splits
        mask = jnp.zeros((1, 1, keys), bool).at[0, 0, piece].set(True)
        new = partial_attention(query, keys_first, values_first, mask, scale)
        part = new if part is None else merge(part, new, scale)
    np.testing.assert_allclose(finish(part, sinks, scale, jnp.float32)[0, 0], expected, atol=2e-6)


def test_at04_block_size_does_not_matter(monkeypatch):
    q, k, v, sinks = draw(600)
    outs = []
    for budget in (1 << 26, 4 * PAGE_SIZE * 600, 1):
        monkeypatch.setattr(attention, "MAX_BLOCK_SCORES", budget)
        fresh = jax.jit(lambda *args, window: write_and_attend(*args, window), static_argnames="window")
        outs.append(through_pages(q, k, v, sinks, None, [600], run=fresh))
    np.testing.assert_allclose(outs[0], outs[1], atol=2e-6)
    np.testing.assert_allclose(outs[0], outs[2], atol=2e-6)


@pytest.mark.parametrize("page_window", [(13, 16), (16, 16), (513, 64)])
def test_at14_freed_pages_are_never_read(page_window, monkeypatch):
    """A ring of window pages, each overwritten as soon as it may be, decodes as the whole history does."""
    window, page = page_window
    for module in ("modeling.cache", "modeling.layers.attention"):
        monkeypatch.setattr(f"{module}.PAGE_SIZE", page)
    tokens = 2000 if window == 513 else 400
    q, k, v, sinks = draw(tokens, heads=2, kv_heads=1, d=8)
    expected = numpy_attention(q, k, v, sinks, window)
    ring = -(-window // page) + 1
    table = jnp.arange(ring, dtype=jnp.int32)[None]
    pool = jnp.full((ring, 1, page, 8), np.nan, jnp.float32)

    @jax.jit
    def step(cache, position, q, k, v):
        valid = jnp.ones((1, 1), bool)
        cache = write_pages(cache, k, v, table, position[None, None], valid)
        return cache, paged_attention(q, cache, jnp.asarray(sinks), table, position[None, None], valid, window)

    cache = LayerCache(pool, pool)
    for i in range(tokens):
        cache, out = step(cache, jnp.int32(i), q[None, i : i + 1], k[None, i : i + 1], v[None, i : i + 1])
        if i % 37 == 0 or i > tokens - 20:
            np.testing.assert_allclose(out[0, 0], expected[i], atol=3e-6)


def test_at16_rows_without_keys_give_zero_and_disturb_nobody():
    q, k, v, sinks = draw(5)
    batch = [jnp.stack([jnp.asarray(x), jnp.asarray(x)]) for x in (q, k, v)]
    table = jnp.array([[0], [1]], jnp.int32)
    positions = jnp.stack([jnp.arange(5), jnp.arange(5)])
    valid = jnp.array([[True] * 5, [False] * 5])
    pool = jnp.full((2, 2, PAGE_SIZE, 16), np.nan, jnp.float32)

    @jax.jit
    def run(cache, q, k, v):
        return paged_attention(
            q, write_pages(cache, k, v, table, positions, valid), sinks, table, positions, valid, None
        )

    out = np.asarray(run(LayerCache(pool, pool), *batch))
    assert (out[1] == 0).all()
    np.testing.assert_allclose(out[0], numpy_attention(q, k, v, sinks, None), atol=2e-6)
    masked = Partial(jnp.full((1, 2, 2, 1), -jnp.inf), jnp.zeros((1, 2, 2, 1)), jnp.zeros((1, 2, 2, 1, 16)))
    assert np.isfinite(np.asarray(finish(masked, jnp.full(4, -1e4), 0.25, jnp.float32))).all()


@pytest.mark.parametrize("tokens", [1, 7, 63, 65, 127, 513, 4092])
def test_at17_odd_lengths(tokens):
    q, k, v, sinks = draw(tokens, heads=2, kv_heads=1, d=8)
    expected = numpy_attention(q, k, v, sinks, None)[-1]
    first = through_pages(q, k, v, sinks, None, [tokens])[-1]
    np.testing.assert_allclose(first, expected, atol=3e-6)
    for _ in range(3):
        np.testing.assert_array_equal(through_pages(q, k, v, sinks, None, [tokens])[-1], first)


def test_jx01_writes_to_a_page_past_the_pool_are_dropped():
    _, k, v, _ = draw(4)
    pool = jnp.full((2, 2, PAGE_SIZE, 16), 7.0, jnp.float32)
    positions, valid = jnp.arange(4)[None], jnp.ones((1, 4), bool)
    for page in (2, 3, -1, 2**30):
        table = jnp.array([[page]], jnp.int32)
        cache = write_pages(LayerCache(pool, pool), jnp.asarray(k[None]), jnp.asarray(v[None]), table, positions, valid)
        assert (np.asarray(cache.k) == 7).all()
        assert (np.asarray(cache.v) == 7).all()


@pytest.mark.parametrize("window", [None, 13])
def test_jx05_poison_in_unused_places_does_not_matter(window):
    q, k, v, sinks = draw(70)
    outs = [through_pages(q, k, v, sinks, window, [33, 37], poison) for poison in (0.0, np.nan, np.inf, -np.inf)]
    for out in outs[1:]:
        np.testing.assert_array_equal(outs[0], out)


def test_one_visible_key_gives_half_the_value_at_equal_sink():
    q = np.zeros((1, 2, 8), np.float32)
    v = np.random.default_rng(0).standard_normal((1, 1, 8)).astype(np.float32)
    out = dense_attention(q[None], v[None], v[None], np.zeros(2, np.float32), jnp.zeros((1, 1), jnp.int32), None)
    np.testing.assert_allclose(out[0, 0], np.repeat(v[0] / 2, 2, 0), rtol=1e-6)


def test_rope_self_checks():
    cos, sin = rope_angles(jnp.array([[1]]), 128, 10000.0)
    angles = np.arctan2(np.asarray(sin), np.asarray(cos))[0, 0]
    np.testing.assert_allclose(angles[[0, 1, 63]], [1, 0.8659643, 1.154782e-4], rtol=1e-5)
    x = jnp.zeros((1, 1, 1, 128)).at[..., 3].set(1.0)
    turned = np.asarray(apply_rope(x, cos, sin))[0, 0, 0]
    assert set(np.flatnonzero(turned)) == {3, 67}  # half-split pairs, not neighbours


def test_inverse_frequencies_are_pytorchs():
    """`1 / theta ** (arange(0, 128, 2).float() / 128)` of PyTorch on a CPU at the published sizes, bit for bit."""
    pytorch = np.array(PYTORCH_INV_FREQ, np.uint32).view(np.float32)
    np.testing.assert_array_equal(inverse_frequencies(128, 10000.0), pytorch)
    exact = (1.0 / 10000.0 ** (np.arange(0, 128, 2) / 128)).astype(np.float32)
    assert (exact != pytorch).sum() > 10  # so the test can tell


def test_rope_angle_is_the_float32_product_at_long_positions():
    position = 262143
    angle = np.float32(position) * inverse_frequencies(128, 10000.0)
    cos, sin = rope_angles(jnp.array([[position]]), 128, 10000.0)
    np.testing.assert_allclose(cos[0, 0], np.cos(angle.astype(np.float64)), atol=2e-6)
    np.testing.assert_allclose(sin[0, 0], np.sin(angle.astype(np.float64)), atol=2e-6)
