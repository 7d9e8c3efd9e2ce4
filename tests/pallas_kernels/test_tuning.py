"""Block sizes as data: lookup, malformed tables, and the ops that look them up."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import decode_attention, dense_gemv, moe, router, tuning
from pallas_kernels.decode_attention import Schedule, default_schedule
from pallas_kernels.tuning import SIZES, attention_case, block_sizes, case_of, read_table, table_path
from pallas_kernels.warp_tiles import Matrix

ENTRY = {"row_groups": 2, "num_warps": 4, "us": 1.5}


def bf16(*shape):
    return Matrix(jax.ShapeDtypeStruct(shape, jnp.bfloat16))


def nvfp4(*shape):
    *lead, columns = shape
    return Matrix(
        jax.ShapeDtypeStruct((*lead, columns // 4), jnp.uint16),
        jax.ShapeDtypeStruct((*lead, columns // 16), jnp.uint8),
        jax.ShapeDtypeStruct(tuple(lead[:-1]), jnp.float32),
    )


def table(cases, **changes) -> str:
    return json.dumps({"device": "NVIDIA H200", "date": "2026-11-30", "jax": "0.11.2", "cases": cases} | changes)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A folder in place of the one with the tables."""
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    tuning._table.cache_clear()
    yield tmp_path
    tuning._table.cache_clear()


def test_installed_tables_are_well_formed_and_bear_their_devices_names():
    found = sorted(tuning.TABLES.glob("*.json"))
    assert tuning.TABLES / "nvidia_h200.json" in found
    for path in found:
        content = read_table(path)
        assert content["cases"]
        assert table_path(content["device"]) == path


def test_cases_are_named_by_format_shapes_and_tokens():
    projections = [(4096, 2048), (512, 2048), (512, 2048)]
    assert case_of([nvfp4(*s) for s in projections], 1) == "nvfp4 4096x2048 512x2048 512x2048, 1 token"
    assert case_of([bf16(*s) for s in projections], 8) == "bf16 4096x2048 512x2048 512x2048, 5-8 tokens"
    assert case_of([nvfp4(256, 512, 2048), nvfp4(1024, 2048)], 3) == "nvfp4 256x512x2048 1024x2048, 2-4 tokens"
    assert case_of([Matrix(jax.ShapeDtypeStruct((256, 2048), jnp.float32))], 1) == "float32 256x2048, 1 token"
    buckets = {n: tuning.tokens_bucket(n) for n in range(1, 9)}
    assert [buckets[n] for n in (1, 2, 4, 5, 8)] == ["1 token", "2-4 tokens", "2-4 tokens", "5-8 tokens", "5-8 tokens"]
    assert len(set(buckets.values())) == 3


def test_attention_cases_are_named_by_heads_reach_and_rows():
    assert attention_case(1, 4, 1600, None) == attention_case(1, 4, 2049, None) == "4 kv heads, 2048 pages, 1 row"
    assert attention_case(1, 4, 3000, None) == "4 kv heads, 4096 pages, 1 row"
    assert attention_case(8, 4, 1, None) == "4 kv heads, 1 pages, 8 rows"
    assert attention_case(8, 4, 17, 513) == attention_case(8, 4, 9, 513) == "4 kv heads, window 513, 8 rows"


def test_a_device_without_a_table_uses_the_h200s(tables):
    (tables / "nvidia_h200.json").write_text(table({"dense_gemv": {"a": ENTRY}}))
    assert block_sizes("dense_gemv", "a") == {"row_groups": 2, "num_warps": 4}
    assert block_sizes("dense_gemv", "b") is None
    assert block_sizes("router", "a") is None
    with pytest.raises(ValueError, match=r"no op 'gemv'.*dense_gemv"):
        block_sizes("gemv", "a")


def test_a_devices_own_table_is_the_one_that_counts(tables):
    (tables / "nvidia_h200.json").write_text(table({"dense_gemv": {"a": ENTRY, "b": ENTRY}}))
    own = tables / table_path(jax.devices()[0].device_kind).name
    own.write_text(table({"dense_gemv": {"a": ENTRY | {"num_warps": 16}}}))
    assert block_sizes("dense_gemv", "a") == {"row_groups": 2, "num_warps": 16}
    assert block_sizes("dense_gemv", "b") is None
    assert table_path("NVIDIA H200 NVL").name == "nvidia_h200_nvl.json"
    assert table_path("NVIDIA GeForce RTX(TM) 5090").name == "nvidia_geforce_rtx_tm_5090.json"


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not JSON"),
        ("[]", "an object is expected"),
        (json.dumps({"cases": {}}), "date, device, jax missing"),
        (table({}, author="x"), "unknown author"),
        (table([]), "cases: an object is expected"),
        (table({"gemv": {}}), "unknown gemv; known are decode_attention, dense_gemv"),
        (table({"router": []}), "router is no object"),
        (table({"dense_gemv": {"a": [1, 8]}}), "dense_gemv, 'a': an object is expected"),
        (table({"dense_gemv": {"a": ENTRY | {"stages": 1}}}), "dense_gemv, 'a': unknown stages; known are num_warps"),
        (table({"dense_gemv": {"a": {"row_groups": 1, "us": 2.0}}}), "dense_gemv, 'a': num_warps missing"),
        (table({"dense_gemv": {"a": {"row_groups": 1, "num_warps": 8}}}), "us missing"),
        (table({"dense_gemv": {"a": ENTRY | {"num_warps": "8"}}}), "num_warps is '8', not a positive integer"),
        (table({"dense_gemv": {"a": ENTRY | {"num_warps": 8.0}}}), "num_warps is 8.0, not a positive integer"),
        (table({"dense_gemv": {"a": ENTRY | {"row_groups": True}}}), "row_groups is True"),
        (table({"dense_gemv": {"a": ENTRY | {"row_groups": 0}}}), "row_groups is 0"),
        (table({"dense_gemv": {"a": ENTRY | {"us": None}}}), "us is None, not a positive number"),
    ],
)
def test_a_malformed_table_is_refused_with_its_place(tables, text, message):
    path = tables / "nvidia_h200.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as refusal:
        block_sizes("dense_gemv", "a")
    assert str(path) in str(refusal.value)


def test_sizes_are_the_ops_own():
    names = {
        "decode_attention": [decode_attention.Schedule],
        "dense_gemv": [dense_gemv.Blocks],
        "dense_gemv_swiglu": [dense_gemv.Blocks],
        "moe_down": [moe.Blocks],
        "moe_gate_up": [moe.Blocks],
        "router": [router.Blocks],
    }
    assert names.keys() == SIZES.keys()
    for op, [blocks] in names.items():
        fields = {field.name for field in dataclasses.fields(blocks)}
        assert set(SIZES[op]) <= fields if blocks is moe.Blocks else set(SIZES[op]) == fields
    both = {*SIZES["moe_gate_up"], *SIZES["moe_down"]}
    assert both == {field.name for field in dataclasses.fields(moe.Blocks)}


def test_dense_gemv_takes_what_the_table_has(tables):
    pair = [bf16(96, 64), bf16(96, 64)]
    cases = {
        "dense_gemv": {case_of(pair, 4): ENTRY},
        "dense_gemv_swiglu": {case_of(pair, 4): ENTRY | {"num_warps": 16}},
    }
    (tables / "nvidia_h200.json").write_text(table(cases))
    assert dense_gemv.default_blocks(4, 64, pair) == dense_gemv.Blocks(2, 4)
    assert dense_gemv.default_blocks(2, 64, pair) == dense_gemv.Blocks(2, 4)
    assert dense_gemv.default_blocks(4, 64, pair, "swiglu") == dense_gemv.Blocks(2, 16)
    assert dense_gemv.default_blocks(5, 64, pair) == dense_gemv.Blocks(2, 16)  # the rule's
    assert dense_gemv.default_blocks(1, 64, pair[:1]) == dense_gemv.Blocks(2, 8)


def test_the_router_takes_what_the_table_has(tables, monkeypatch):
    (tables / "nvidia_h200.json").write_text(
        table({"router": {"float32 8x64, 1 token": {"experts": 4, "num_warps": 2, "us": 1}}})
    )
    taken = []
    monkeypatch.setattr(router.triton, "router", lambda *_, blocks, **options: taken.append(blocks) or [])
    for dtype in (jnp.float32, jnp.bfloat16):
        x, weight, gate = jnp.zeros((1, 64), jnp.bfloat16), jnp.ones(64, jnp.bfloat16), jnp.zeros((8, 64), dtype)
        router.router(x, x, weight, gate, norm_eps=1e-6, round_logits=False)
    assert taken == [router.Blocks(4, 2), router.Blocks()]


def test_decode_attention_takes_what_the_table_has(tables):
    sizes = {"num_splits": 7, "block_keys": 32, "num_warps": 8, "num_stages": 2}
    name = attention_case(2, 4, 100, None)
    (tables / "nvidia_h200.json").write_text(table({"decode_attention": {name: sizes | {"us": 3.2}}}))
    assert default_schedule(2, 4, 128, None) == Schedule(7, 32, 8, 2)
    assert default_schedule(2, 4, 128, None, num_splits=5) == Schedule(5)
    assert default_schedule(1, 4, 128, None) == Schedule(98, num_stages=3)
