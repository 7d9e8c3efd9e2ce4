"""Router and experts: ties, precision, and three ways to run experts that agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modeling.layers import experts as experts_module
from modeling.layers.experts import Experts, experts_gather, experts_grouped, experts_reference
from modeling.layers.linear import Linear, dequantize_nvfp4
from modeling.layers.moe import SparseMLP


def make(module, seed=0, scale=1.0):
    """Fills a module with normal values (bits for packed leaves), in each leaf's dtype."""
    leaves, treedef = jax.tree.flatten(module)
    rng = np.random.default_rng(seed)
    filled = []
    for leaf in leaves:
        if leaf.dtype == jnp.uint16:
            filled.append(jnp.asarray(rng.integers(0, 1 << 16, leaf.shape), jnp.uint16))
        elif leaf.dtype == jnp.uint8:
            filled.append(jnp.asarray(rng.integers(0x20, 0x40, leaf.shape), jnp.uint8))
        elif leaf.ndim < 2:
            filled.append(jnp.asarray(rng.uniform(0.01, 0.02, leaf.shape), leaf.dtype))
        else:
            filled.append(jnp.asarray(rng.standard_normal(leaf.shape) * scale / leaf.shape[-1] ** 0.5, leaf.dtype))
    return jax.tree.unflatten(treedef, filled)


def sparse(router_dtype="float32", num_experts=8, k=2, hidden=64):
    return make(SparseMLP(hidden, num_experts, k, 64, 64, True, "bf16", router_dtype))


@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 33, 100])
def test_three_ways_agree(tokens, dtype, weight_format):
    experts = make(Experts(8, 64, 64, weight_format))
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, 64)), dtype)
    ids = jnp.asarray(np.argsort(rng.random((tokens, 8)), -1)[:, :3], jnp.int32)
    weights = jnp.asarray(rng.random((tokens, 3)), jnp.float32)
    ways = [jax.jit(way)(experts, x, weights, ids) for way in (experts_reference, experts_gather, experts_grouped)]
    # In bfloat16 the order of a dot's float32 sum may move a rounding of the activation or the row by one step.
    bound = 1e-6 if dtype == jnp.float32 else 2e-3
    for way in ways[1:]:
        assert np.linalg.norm(way - ways[0]) <= bound * np.linalg.norm(ways[0])


def test_grouped_with_every_token_on_one_expert_and_with_empty_experts():
    experts = make(Experts(8, 64, 64, "bf16"))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((50, 64)), jnp.float32)
    ids = jnp.full((50, 1), 7, jnp.int32)
    weights = jnp.ones((50, 1))
    np.testing.assert_allclose(
        jax.jit(experts_grouped)(experts, x, weights, ids), experts_reference(experts, x, weights, ids), atol=1e-6
    )


@pytest.mark.parametrize("real", [0, 1, 40, 99])
def test_padding_tokens_run_no_expert_and_change_nothing(real):
    block, x = sparse(), jnp.asarray(np.random.default_rng(1).standard_normal((1, 100, 64)), jnp.float32)
    valid = jnp.arange(100)[None] < real
    expected = jax.jit(lambda block, x: block(x))(block, x)
    poisoned = jnp.where(valid[..., None], x, jnp.nan)
    out = jax.jit(lambda block, x, valid: block(x, valid))(block, poisoned, valid)
    np.testing.assert_allclose(out[0, :real], expected[0, :real], atol=1e-5)


def test_decode_and_prefill_use_different_ways(monkeypatch):
    used = []
    for name in ("experts_gather", "experts_grouped", "experts_reference"):
        way = getattr(experts_module, name)
        monkeypatch.setattr(experts_module, name, lambda *args, way=way, name=name: (used.append(name), way(*args))[1])
    block = sparse()
    block(jnp.ones((1, 8, 64), jnp.float32), jnp.ones((1, 8), bool))
    block(jnp.ones((1, 64, 64), jnp.float32), jnp.ones((1, 64), bool))
    block(jnp.ones((1, 8, 64), jnp.float32))
    assert used == ["experts_gather", "experts_grouped", "experts_reference"]


def test_mo01_router_precision_decides_close_logits():
    """Two logits closer than one bfloat16 step: float32 tells them apart, the bfloat16 rule ties them."""
    gate = np.zeros((4, 64), np.float32)
    gate[2, 0], gate[3, 0] = 1.0, 1.0 + 2**-9  # half a bfloat16 step apart
    x = jnp.zeros((1, 64), jnp.bfloat16).at[0, 0].set(1.0)
    chosen = {}
    for router_dtype in ("float32", "bfloat16"):
        block = sparse(router_dtype, num_experts=4, k=1)
        block.gate = nnx.Param(jnp.asarray(gate, jnp.dtype(router_dtype)))
        weights, ids = block.route(x)
        chosen[router_dtype] = int(ids[0, 0])
        assert weights.dtype == jnp.float32
    assert chosen == {"float32": 3, "bfloat16": 2}


def test_bfloat16_routing_weights_are_rounded_and_float32_ones_are_not():
    x = jnp.asarray(np.random.default_rng(3).standard_normal((50, 64)), jnp.bfloat16)
    rounded, _ = sparse("bfloat16", k=3).route(x)
    exact, _ = sparse("float32", k=3).route(x)
    assert (rounded == rounded.astype(jnp.bfloat16).astype(jnp.float32)).all()
    assert (exact != exact.astype(jnp.bfloat16).astype(jnp.float32)).any()
    np.testing.assert_allclose(exact.sum(-1), 1, rtol=1e-6)


def test_all_logits_equal_gives_bf16_of_a_sixth():
    block = sparse("bfloat16", num_experts=16, k=6)
    block.gate = nnx.Param(jnp.zeros((16, 64), jnp.bfloat16))
    weights, ids = block.route(jnp.ones((1, 64), jnp.bfloat16))
    assert ids[0].tolist() == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(weights, np.float32(0.16699219))


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_mo02_lowest_index_wins_among_identical_rows(tokens):
    block = sparse(num_experts=8, k=2)
    gate = np.asarray(block.gate[...]).copy()
    gate[[1, 4, 6]] = gate[4] = 3 * np.abs(gate).max()  # three identical rows, far ahead of the others
    block.gate = nnx.Param(jnp.asarray(gate))
    x = jnp.abs(jnp.asarray(np.random.default_rng(0).standard_normal((tokens, 64)), jnp.float32))
    _, ids = block.route(x)
    assert (ids == jnp.array([1, 4])).all()


def test_selection_is_on_logits_where_sigmoids_saturate():
    block = sparse(num_experts=4, k=1)
    gate = np.zeros((4, 64), np.float32)
    gate[1, 0], gate[3, 0] = 30.0, 31.0  # both sigmoids are 1.0 in float32
    block.gate = nnx.Param(jnp.asarray(gate))
    _, ids = block.route(jnp.zeros((1, 64), jnp.float32).at[0, 0].set(1.0))
    assert int(ids[0, 0]) == 3


def test_mo09_float32_products_are_full_precision():
    """Every float32 dot of the model asks for the highest precision, which a GPU would otherwise lower to TF32."""
    block = sparse()
    x = jnp.ones((2, 8, 64), jnp.float32)
    text = jax.jit(lambda block, x: block(x)).lower(block, x).as_text()
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert dots
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in dots)


def test_nvfp4_block_decodes_as_published():
    """The format's test vector, already repacked: lowest bits first, one E4M3 scale a 16 values."""
    codes = np.frombuffer(bytes.fromhex("2064A8EC3175B9FD3175B9FD2064A8EC" + "77" * 12 + "FF" * 4), np.uint16)
    scales = np.frombuffer(bytes.fromhex("3840307E"), np.uint8)
    expected = np.concatenate(
        [
            [0, 1, 2, 4, 0, -1, -2, -4, 0.5, 1.5, 3, 6, -0.5, -1.5, -3, -6],
            [1, 3, 6, 12, -1, -3, -6, -12, 0, 2, 4, 8, 0, -2, -4, -8],
            [3] * 16,
            [2688] * 8 + [-2688] * 8,
        ]
    )
    for dtype in (jnp.bfloat16, jnp.float32):
        got = dequantize_nvfp4(jnp.asarray(codes), jnp.asarray(scales), dtype)
        np.testing.assert_array_equal(np.asarray(got, np.float32), expected)


def test_every_nvfp4_product_is_exact_in_bfloat16():
    scales = np.array([b for b in range(0x7F)], np.uint8)
    codes = np.tile(np.array([0x3210, 0x7654, 0xBA98, 0xFEDC], np.uint16), (len(scales), 1))
    args = jnp.asarray(codes), jnp.asarray(scales[:, None])
    exact = dequantize_nvfp4(*args, jnp.float32)
    np.testing.assert_array_equal(np.asarray(dequantize_nvfp4(*args, jnp.bfloat16), np.float32), exact)
    assert float(jnp.abs(exact).max()) == 2688


def test_global_scale_multiplies_the_accumulator():
    """A scale that bfloat16 cannot hold must not be rounded into the weights."""
    linear = make(Linear(32, 64, "nvfp4"))
    linear.global_scale = nnx.Param(jnp.float32(1.0 + 2**-12))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)), jnp.bfloat16)
    plain = make(Linear(32, 64, "nvfp4"))
    plain.global_scale = nnx.Param(jnp.float32(1.0))
    ratio = np.asarray(linear.accumulate(x)) / np.asarray(plain.accumulate(x))
    np.testing.assert_allclose(ratio, 1.0 + 2**-12, rtol=1e-6)
