"""Benchmarks run end to end on a few layers, and count work as published."""

import json
from pathlib import Path

import jax
import pytest
from small import SMALL

from benchmarks import decode, prefill, speculation
from benchmarks.full_size import MODELS, abstract_model
from modeling.flint.config import FlintConfig
from modeling.flint.decode import Kernels
from modeling.flint.model import Flint
from modeling.inkling.config import INKLING_SMALL, InklingConfig

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
def test_commands_print_one_json_line(weight_format, monkeypatch, capsys):
    monkeypatch.setitem(MODELS, "flint", SMALL)
    assert decode.main(["--format", weight_format, "--context", "100", "--steps", "2", "--repeats", "2"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["ms_min"] <= line["ms_per_token"] <= line["ms_max"]
    assert 0 < line["fraction_of_bandwidth"] < 1
    assert line["floor_ms"] == pytest.approx(line["ms_per_step"] * line["fraction_of_bandwidth"], rel=0.02)
    assert prefill.main(["--format", weight_format, "--tokens", "128", "--chunk", "64", "--repeats", "2"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["ms_min"] <= line["ms"] <= line["ms_max"]


def decode_line(capsys, *arguments: str) -> dict:
    common = ["--layers", "1", "--context", "100", "--batch", "2", "--steps", "2", "--repeats", "2"]
    assert decode.main([*common, *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_decode_is_timed_with_kernels_and_beside_them_without(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(decode, "choose_kernels", lambda *args: asked.append(args[1:3]) or Kernels("reference"))
    monkeypatch.setitem(MODELS, "flint", SMALL)
    line = decode_line(capsys)
    assert asked == [("auto", 2)]
    assert line["path"] == "pallas"
    own = {name for name in line if f"plain_{name}" in line}
    assert own >= {"ms_per_token", "ms_min", "ms_max", "fraction_of_bandwidth", "kernels_per_step", "compile_s"}
    line = decode_line(capsys, "--path", "pallas", "--sample")
    assert asked[1:] == [("pallas", 2)]
    assert (line["path"], line["sample"]) == ("pallas", True)
    assert not [name for name in line if name.startswith("plain_")]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernels can run here")
def test_decode_without_kernels_says_so(monkeypatch, capsys, caplog):
    monkeypatch.setitem(MODELS, "flint", SMALL)
    line = decode_line(capsys, "--sample")
    assert (line["path"], line["sample"], line["kernels_per_step"]) == ("plain", True, None)
    assert not [name for name in line if name.startswith("plain_")]
    assert "decode runs on plain XLA: the kernels need an NVIDIA GPU" in caplog.text
    with pytest.raises(SystemExit):
        decode.main(["--path", "pallas", "--layers", "1"])
    assert "the Pallas decode kernels cannot run" in capsys.readouterr().err


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


INKLING = InklingConfig(
    vocab_size=256,
    kept_vocab_size=250,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    intermediate_size=128,
    moe_intermediate_size=32,
    vision=None,
    audio=None,
    image_token_id=None,
    audio_token_id=None,
    eos_token_ids=(),
)


def test_commands_run_inkling_with_drafts(monkeypatch, capsys):
    monkeypatch.setitem(MODELS, "inkling-small", INKLING)
    common = ["--model", "inkling-small", "--repeats", "2"]
    assert decode.main([*common, "--context", "100", "--steps", "2", "--drafts", "2"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["drafts"] == 2
    assert 0 < line["fraction_of_bandwidth"] < 1
    assert prefill.main([*common, "--tokens", "128", "--chunk", "64"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 128
    with pytest.raises(SystemExit):
        decode.main(["--model", "flint", "--drafts", "1"])


def test_fr01_rates_with_drafts_of_the_embedded_checkpoint(capsys):
    arguments = ["--model", str(ROOT / "checkpoints/inkling-tiny"), "--requests", "3", "--repeats", "1"]
    assert speculation.main([*arguments, "--drafts", "2", "--max-tokens", "24"]) == 0
    line = json.loads(capsys.readouterr().out)
    [run] = line["runs"]
    assert run["num_draft_tokens"] == 2
    assert 2 < run["tokens_per_step"] <= 3  # it was trained to draft
    assert run["tokens_per_step"] == pytest.approx(1 + sum(run["accepted_by_depth"]), abs=2e-3)
    assert line["answers_that_differ"] == 0


@pytest.mark.parametrize(
    "config, weight_format, drafts, expected",
    [  # weights of spec 9.2 and 9.4, the padded rows of the head included
        (InklingConfig(), "nvfp4", 0, 48_862_216_404 + 11_870_208),
        (InklingConfig(), "bf16", 0, 79_629_792_516 + 11_870_208),
        (INKLING_SMALL, "nvfp4", 0, 13_874_093_044 + 7_913_472),
        (INKLING_SMALL, "nvfp4", 8, 57.5e9),
        (InklingConfig(), "nvfp4", 8, 170.6e9),
    ],
)
def test_bytes_a_step_of_inkling_are_the_published_ones(config, weight_format, drafts, expected):
    model = abstract_model(config, weight_format, drafts)
    conv = sum(sum(layer.conv_channels) for layer in (*config.cache_layers, *config.draft_cache_layers[:drafts])) * 6
    got = decode.bytes_a_step(model, context=0, batch=1, drafts=drafts) - conv
    assert got == pytest.approx(expected, rel=1e-6 if not drafts else 5e-3)


def test_flops_of_8192_tokens_are_the_published_ones():
    # 36.2 TFLOP linear, 7.7 full attention, 2.3 sliding, and one position's logits.
    assert prefill.flops(FlintConfig(), 8192) == pytest.approx(46.2e12, rel=5e-3)
