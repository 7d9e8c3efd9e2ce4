"""The tuning command on a CPU: what it measures, and what it writes. Times are made up."""

import dataclasses
import functools
import json

import jax
import pytest

from benchmarks import tune, tune_cases
from benchmarks.compiled import decode_launch_of
from benchmarks.full_size import abstract_model
from benchmarks.tune_cases import cases_of
from modeling.flint.config import FlintConfig
from modeling.flint.decode import Kernels
from modeling.kernels import with_kernels
from pallas_kernels import tuning
from pallas_kernels.tuning import SIZES, read_table

SMALL = FlintConfig(
    vocab_size=272,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=144,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=80,
    num_experts=8,
    num_experts_per_tok=2,
    sliding_window=33,
)


@functools.cache
def published(tokens: int):
    return {(case.op, case.name): case for case in cases_of(FlintConfig(), [*SIZES], ["nvfp4"], [tokens])}


def test_candidates_of_the_published_model():
    cases = published(1)
    qkv = cases["dense_gemv", "nvfp4 4096x2048 512x2048 512x2048, 1 token"]
    assert {tuple(sizes.values()) for sizes in qkv.candidates} == {(r, w) for r in (1, 2, 4, 5) for w in (4, 8, 16)}
    assert len(cases["router", "float32 256x2048, 1 token"].candidates) == 6
    down = cases["moe_down", "nvfp4 256x2048x512 2048x1024, 1 token"]
    assert {"down_row_groups": 2, "down_warps": 16} in down.candidates
    assert cases["dense_gemv_swiglu", "nvfp4 6144x2048 6144x2048, 1 token"].kernel == "dense_gemv"
    for (op, _), case in cases.items():
        assert all(tuple(sizes) == SIZES[op] for sizes in case.candidates)
        distinct = {tuple(sizes.values()) for sizes in case.candidates}
        assert 6 <= len(distinct) == len(case.candidates) <= 16
    for sizes in cases["decode_attention", "4 kv heads, 2048 pages, 1 row"].candidates:
        assert 32 <= sizes["num_splits"] <= 98
    assert {s["num_splits"] for s in cases["decode_attention", "4 kv heads, window 513, 1 row"].candidates} >= {
        5,
        9,
        17,
    }


def test_the_published_bytes_and_enough_launches_to_empty_the_cache():
    for tokens in (1, 8):
        for case in published(tokens).values():
            rotation = case.num_launches * case.num_bytes
            assert rotation >= 64 << 20 or case.num_launches == 32, case.name
            weights = jax.eval_shape(lambda case=case: case.make(2))
            assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights)) >= 2 * case.num_bytes
    qkv = published(1)["dense_gemv", "nvfp4 4096x2048 512x2048 512x2048, 1 token"]
    assert qkv.num_bytes == 5120 * 2048 * 9 // 16 + 3 * 4
    sliding = published(8)["decode_attention", "4 kv heads, window 513, 8 rows"]
    assert sliding.num_bytes == 8 * 513 * 4 * 128 * 2 * 2


def test_tokens_of_one_case_are_measured_once():
    once = cases_of(SMALL, ["dense_gemv"], ["bf16"], [8, 5])
    assert [case.name for case in once] == [case.name for case in cases_of(SMALL, ["dense_gemv"], ["bf16"], [8])]
    both = cases_of(SMALL, ["router"], ["bf16", "nvfp4"], [1, 8])
    assert [case.name for case in both] == ["float32 8x128, 1 token", "float32 8x128, 5-8 tokens"]


@pytest.mark.parametrize("weight_format, rows", [("nvfp4", 1), ("bf16", 8)])
def test_the_cases_are_those_that_a_decode_step_looks_up(weight_format, rows, monkeypatch):
    looked_up = set()

    class Recorder(dict):
        def __init__(self, op=None):
            self.op = op

        def get(self, key, default=None):
            if self.op is None:
                return Recorder(key)
            looked_up.add((self.op, key))
            return default

    monkeypatch.setattr(tuning, "_table", lambda device_kind: Recorder())
    monkeypatch.setattr(tune_cases, "CONTEXTS", (1000,))
    model = with_kernels(abstract_model(SMALL, weight_format), Kernels())
    jax.eval_shape(*decode_launch_of(model, 1000, rows, 0, False))
    assert looked_up == {(case.op, case.name) for case in cases_of(SMALL, [*SIZES], [weight_format], [rows])}


def few(cases, count=2):
    return [dataclasses.replace(case, candidates=case.candidates[:count], num_launches=2) for case in cases]


def test_every_op_runs_and_the_fastest_candidate_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune_cases, "CONTEXTS", (200,))
    asked = []

    def times(run, kernel):
        run()
        asked.append(kernel)
        return [9.0, 5.004 - len(asked) % 2, 1.0]  # of two candidates the first is the faster

    monkeypatch.setattr(tune, "kernel_times", times)
    cases = few({case.op: case for case in cases_of(SMALL, [*SIZES], ["nvfp4"], [1])}.values())
    assert len(cases) == len(SIZES)
    out = tmp_path / "tuned" / "gpu.json"
    assert tune.tune(cases, out, "Some GPU", implementation="reference") == 0
    assert asked == [case.kernel for case in cases for _ in range(2)]
    table = read_table(out)
    assert (table["device"], table["jax"]) == ("Some GPU", jax.__version__)
    assert {(op, name) for op, names in table["cases"].items() for name in names} == {(c.op, c.name) for c in cases}
    for case in cases:
        assert table["cases"][case.op][case.name] == case.candidates[0] | {"us": 4.0}
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == len(cases) + 1
    assert f"[{len(cases)}/{len(cases)}]" in printed.err and "5.00 us" in printed.err


def test_what_a_kernel_does_not_write_is_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "kernel_times", lambda run, kernel: [3.0])
    [case] = few(cases_of(SMALL, ["moe_gate_up"], ["bf16"], [3]), count=1)  # six slots, and at most four are used
    assert tune.tune([case], tmp_path / "gpu.json", "Some GPU", interpret=True) == 0


def test_candidates_that_fail_or_are_wrong_are_left_out(tmp_path, monkeypatch, capsys):
    [case] = cases_of(SMALL, ["router"], ["bf16"], [1])

    def launch(sizes=None, **how):
        run = case.launch(sizes=sizes, **how)
        if sizes and sizes["num_warps"] == 4:
            raise ValueError("spills\nand more")
        wrong = sizes and sizes["experts"] < 4

        def spoilt(state, fixed, own):
            [logits, *rest], state = run(state, fixed, own)
            return [logits * 1.02 if wrong else logits, *rest], state

        return spoilt

    monkeypatch.setattr(tune, "kernel_times", lambda run, kernel: [2.0])
    spoilt = dataclasses.replace(case, launch=launch, num_launches=2)
    out = tmp_path / "gpu.json"
    assert tune.tune([spoilt], out, "Some GPU", interpret=True) == 0
    assert read_table(out)["cases"] == {"router": {case.name: {"experts": 4, "num_warps": 8, "us": 2.0}}}
    printed = capsys.readouterr().err
    assert printed.count("does not compile: ValueError: spills\n") == 3
    assert printed.count("wrong, off by 2.0e-02") == 2
    out.unlink()
    none = dataclasses.replace(spoilt, candidates=spoilt.candidates[:4])
    assert tune.tune([none], out, "Some GPU", interpret=True) == 1
    assert not out.exists()
    assert "no candidate works" in capsys.readouterr().err


def test_a_table_keeps_what_was_not_measured_again(tmp_path):
    out = tmp_path / "gpu.json"
    entry = {"experts": 2, "num_warps": 8, "us": 2.14}
    tune.write_table(out, "Some GPU", {"router": {"b": entry, "a": entry}})
    tune.write_table(out, "Some GPU", {"router": {"b": entry | {"experts": 1}}})
    gemv = {"row_groups": 1, "num_warps": 8, "us": 6.4}
    tune.write_table(out, "Some GPU", {"dense_gemv": {"c": gemv}})
    cases = read_table(out)["cases"]
    assert cases == {"dense_gemv": {"c": gemv}, "router": {"a": entry, "b": entry | {"experts": 1}}}
    assert '      "a": {"experts": 2, "num_warps": 8, "us": 2.14},\n' in out.read_text()
    assert [*json.loads(out.read_text())] == ["cases", "date", "device", "jax"]
    with pytest.raises(ValueError, match="is of Some GPU, and this is Another"):
        tune.write_table(out, "Another", {"router": {"b": entry}})


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_exit_code_2_without_a_gpu(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        tune.main(["--out", str(tmp_path / "gpu.json")])
    assert stop.value.code == 2
    assert "measured on a GPU, and this is a cpu" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()
