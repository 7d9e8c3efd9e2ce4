"""Benchmarks run end to end on a few layers, and count work as published."""

import json

import pytest

from benchmarks import decode, prefill
from benchmarks.full_size import MODELS
from modeling.flint.config import FlintConfig
from modeling.flint.model import Flint

SMALL = FlintConfig(
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=128,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    num_experts=8,
    num_experts_per_tok=2,
)


@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
def test_commands_print_one_json_line(weight_format, monkeypatch, capsys):
    monkeypatch.setitem(MODELS, "flint", SMALL)
    assert decode.main(["--format", weight_format, "--context", "100", "--steps", "2", "--repeats", "2"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["ms_min"] <= line["ms_per_token"] <= line["ms_max"]
    assert 0 < line["fraction_of_bandwidth"] < 1
    assert prefill.main(["--format", weight_format, "--tokens", "128", "--chunk", "64", "--repeats", "2"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["ms_min"] <= line["ms"] <= line["ms_max"]


@pytest.mark.parametrize(
    "weight_format, context, expected",
    # Weights a step: 1,450,708,248 bytes (NVFP4) and 5,030,984,320 (BF16) with bf16 routers; ours are float32 here.
    [
        ("nvfp4", 1, 1_450_708_248 + 49_283_072 + 100_352),
        ("nvfp4", 100_000, 1_450_708_248 + 49_283_072 + 2_903_971_840),
        ("bf16", 8_192, 5_030_984_320 + 49_283_072 + 271_652_864),
    ],
)
def test_bytes_a_step_are_the_published_ones(weight_format, context, expected):
    model = Flint.abstract(FlintConfig(), weight_format=weight_format)
    assert decode.bytes_a_step(model, context, batch=1) == pytest.approx(expected, rel=1e-4)


def test_flops_of_8192_tokens_are_the_published_ones():
    # 36.2 TFLOP linear, 7.7 full attention, 2.3 sliding, and one position's logits.
    assert prefill.flops(FlintConfig(), 8192) == pytest.approx(46.2e12, rel=5e-3)
