"""Inkling's checkpoints: that every byte arrives where it belongs, in every layout that is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_writer import BF16, F32, Tensors, write_folder, write_safetensors
from inkling_writer import (
    E4M3,
    compressed,
    inkling_config,
    inkling_tensors,
    mtp_tensors,
    packed,
    unpacked,
)
from loaded_model import assert_same_leaves, leaves, load_inkling

import modeling
from modeling.layers.moe import SinkMoE
from modeling.loading import read

FIXTURES = Path(__file__).parents[2] / "fixtures"
INDEX = "model.safetensors.index.json"
CONFIG = inkling_config()
EXPERTS = "model.llm.layers.{}.mlp.experts.{}"


@pytest.fixture
def tensors() -> Tensors:
    return inkling_tensors(CONFIG)


@pytest.mark.parametrize("name", ["inkling-bf16", "inkling-nvfp4", "inkling-mtp"])
def test_float32_logits(name):
    """1e-5: float32 sums in another order differ by about 1e-6; any wrong byte or name by far more."""
    expected = np.load(FIXTURES / name / "expected.npz")
    model = load_inkling(FIXTURES / name, dtype="float32")
    logits = jax.jit(lambda model, ids: model(ids))(model, expected["ids"].astype(np.int32))
    truth = expected["logits_f32"]
    assert np.linalg.norm(logits - truth) <= 1e-5 * np.linalg.norm(truth)


def test_every_byte_of_a_plain_checkpoint_arrives(tmp_path):
    config = inkling_config(depths=2, towers=True)
    tensors = inkling_tensors(config) | mtp_tensors(config)
    found = leaves(load_inkling(write_folder(tmp_path, config, tensors)))
    trunk, depth = "model.llm.layers.", "model.mtp.layers.1.transformer_block."
    expected = {
        "embed.weight": "model.llm.embed.weight",
        "embed_norm.weight": "model.llm.embed_norm.weight",
        "norm.weight": "model.llm.norm.weight",
        "unembed.weight": "model.llm.unembed.weight",
        "layers.3.attn.q_proj.weight": f"{trunk}3.attn.wq_du.weight",
        "layers.3.attn.k_proj.weight": f"{trunk}3.attn.wk_dv.weight",
        "layers.3.attn.v_proj.weight": f"{trunk}3.attn.wv_dv.weight",
        "layers.3.attn.r_proj.weight": f"{trunk}3.attn.wr_du.weight",
        "layers.3.attn.o_proj.weight": f"{trunk}3.attn.wo_ud.weight",
        "layers.3.attn.rel_proj": f"{trunk}3.attn.rel_logits_proj.proj",
        "layers.0.attn.k_norm.weight": f"{trunk}0.attn.k_norm.weight",
        "layers.0.mlp_norm.weight": f"{trunk}0.mlp_norm.weight",
        "layers.0.mlp.output_scale": f"{trunk}0.mlp.global_scale",
        "layers.0.mlp.down_proj.weight": f"{trunk}0.mlp.w2_md.weight",
        "layers.2.mlp.gate": f"{trunk}2.mlp.gate.weight",
        "layers.2.mlp.gate_bias": f"{trunk}2.mlp.gate.bias",
        "layers.2.mlp.gate_scale": f"{trunk}2.mlp.gate.global_scale",
        "layers.2.mlp.experts.down_proj.weight": f"{trunk}2.mlp.experts.w2_weight",
        "layers.2.mlp.shared_experts.down_proj.weight": f"{trunk}2.mlp.shared_experts.shared_w2_weight",
        "mtp.layers.1.hidden_norm.weight": "model.mtp.layers.1.hidden_norm.weight",
        "mtp.layers.1.embed_norm.weight": "model.mtp.layers.1.embed_norm.weight",
        "mtp.layers.1.input_proj.weight": "model.mtp.layers.1.input_proj.weight",
        "mtp.layers.1.block.attn.q_proj.weight": f"{depth}attn.wq_du.weight",
        "mtp.layers.1.block.mlp.output_scale": f"{depth}mlp.global_scale",
        "vision.linears.0.weight": "model.visual.layers.linear_0.weight",
        "vision.linears.1.weight": "model.visual.layers.linear_1.weight",
        "vision.norms.0.weight": "model.visual.layers.norm_0.weight",
        "vision.final_norm.weight": "model.visual.final_norm.weight",
        "audio.encoder.weight": "model.audio.encoder.weight",
        "audio.final_norm.weight": "model.audio.final_norm.weight",
    }
    for leaf, name in expected.items():
        assert np.array_equal(np.asarray(found[leaf]), tensors[name]), leaf
    for leaf in ("layers.3.attn.k_sconv", "layers.3.attn.v_sconv", "layers.3.attn_sconv", "layers.3.mlp_sconv"):
        assert np.array_equal(np.asarray(found[f"{leaf}.weight"]), tensors[f"model.llm.{leaf}.weight"][:, 0]), leaf
    assert sum(leaf.nbytes for leaf in found.values()) == sum(array.nbytes for array in tensors.values())
    assert found["layers.2.mlp.gate_bias"].dtype == found["layers.2.mlp.gate_scale"].dtype == jnp.float32


def test_gate_and_up_rows_alternate_everywhere(tmp_path, monkeypatch):
    """Chunks of a few rows, so that they end inside experts."""
    monkeypatch.setattr(read, "CHUNK", 700)
    config = inkling_config(depths=1)
    tensors = inkling_tensors(config) | mtp_tensors(config)
    found = leaves(load_inkling(write_folder(tmp_path, config, tensors)))
    for mlp, name in {
        "layers.1.mlp": "model.llm.layers.1.mlp.w13_dn.weight",
        "layers.2.mlp.experts": EXPERTS.format(2, "w13_weight"),
        "layers.4.mlp.shared_experts": "model.llm.layers.4.mlp.shared_experts.shared_w13_weight",
        "mtp.layers.0.block.mlp": "model.mtp.layers.0.transformer_block.mlp.w13_dn.weight",
    }.items():
        for row, half in enumerate(("gate_proj", "up_proj")):
            assert np.array_equal(np.asarray(found[f"{mlp}.{half}.weight"]), tensors[name][..., row::2, :]), mlp


def numpy_expert(w13: np.ndarray, w2: np.ndarray, x: np.ndarray) -> np.ndarray:
    """One expert by its definition, one output at a time: rows of w13 are gate 0, up 0, gate 1, up 1, ..."""
    hidden = np.empty((len(x), w2.shape[1]), np.float64)
    for j in range(w2.shape[1]):
        gate, up = x @ w13[2 * j].astype(np.float64), x @ w13[2 * j + 1].astype(np.float64)
        hidden[:, j] = gate / (1 + np.exp(-gate)) * up
    return hidden @ w2.astype(np.float64).T


@pytest.mark.parametrize("layer", [2, 3])
def test_square_experts_are_not_turned(tmp_path, tensors, layer):
    """2F = H in both published sizes: a transposed w13 has the right shape. Layer 2 is BF16, layer 3 NVFP4."""
    tensors = packed(tensors, [3])
    w13, w2 = (EXPERTS.format(layer, f"{part}_weight") for part in ("w13", "w2"))
    assert tensors[EXPERTS.format(2, "w13_weight")].shape == (4, 64, 64)
    values = [tensors[name].astype(F32) if layer == 2 else unpacked(tensors, name) for name in (w13, w2)]
    mlp = load_inkling(write_folder(tmp_path, CONFIG, tensors), dtype="float32").layers[layer].mlp
    assert isinstance(mlp, SinkMoE)
    x = np.random.default_rng(3).standard_normal((5, 64)).astype(F32)
    for e in range(4):
        expected = numpy_expert(values[0][e], values[1][e], x.astype(np.float64))
        result = np.asarray(mlp.experts(jnp.asarray(x), jnp.int32(e)), np.float64)
        assert np.linalg.norm(result - expected) <= 1e-5 * np.linalg.norm(expected), e


def test_nvfp4_codes_and_scale_rows(tmp_path, tensors, monkeypatch):
    monkeypatch.setattr(read, "CHUNK", 101)  # ends inside rows and words
    tensors = packed(tensors, [3, 4])
    model = load_inkling(write_folder(tmp_path, CONFIG, tensors))
    assert model.expert_formats == ("bf16", "bf16", "bf16", "nvfp4", "nvfp4")
    found = leaves(model)
    for layer in (3, 4):
        experts = f"layers.{layer}.mlp.experts."
        w13, w2 = (EXPERTS.format(layer, f"{part}_weight") for part in ("w13", "w2"))
        for projection, name, rows in (
            ("gate", w13, slice(0, None, 2)),
            ("up", w13, slice(1, None, 2)),
            ("down", w2, slice(None)),
        ):
            leaf = f"{experts}{projection}_proj."
            assert found[f"{leaf}codes"].dtype == jnp.uint16
            assert np.array_equal(np.asarray(found[f"{leaf}codes"]).view(np.uint8), tensors[name][:, rows])
            assert np.array_equal(np.asarray(found[f"{leaf}scales"]), tensors[f"{name}.scale"].view(np.uint8)[:, rows])
            assert np.array_equal(np.asarray(found[f"{leaf}global_scale"]), tensors[f"{name}.scale2"])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 1, 1)])
def test_compressed_tensors_global_scales_divide(tmp_path, tensors, flat, shape):
    released = packed(tensors, [3, 4])
    other = compressed(released, [3, 4], flat)
    for name in other:
        if name.endswith("weight_global_scale"):
            other[name] = other[name].reshape(shape)
    expected = load_inkling(write_folder(tmp_path / "released", CONFIG, released))
    assert_same_leaves(load_inkling(write_folder(tmp_path / "other", CONFIG, other)), expected)


def test_ck04_activation_ranges_are_never_used(tmp_path, tensors):
    tensors = packed(tensors, [3, 4])
    expected = load_inkling(write_folder(tmp_path / "whole", CONFIG, tensors))
    for name in list(tensors):
        if name.endswith(".input_amax"):
            tensors[name] = np.array([np.nan]).astype(BF16)
        if name.endswith(".original_shape"):
            del tensors[name]
    assert_same_leaves(load_inkling(write_folder(tmp_path / "damaged", CONFIG, tensors)), expected)
    kept = {name: array for name, array in tensors.items() if not name.endswith(".input_amax")}
    assert_same_leaves(load_inkling(write_folder(tmp_path / "absent", CONFIG, kept)), expected)


@pytest.mark.parametrize(("dtype", "matrices"), [("float32", jnp.float32), ("bfloat16", jnp.bfloat16)])
def test_float32_on_disk(tmp_path, caplog, dtype, matrices):
    """Float32 matrices are rounded for bfloat16 compute, with a warning; norms, convolutions and scales stay."""
    tensors = {name: array.astype(F32) for name, array in inkling_tensors(CONFIG).items()}
    w13 = EXPERTS.format(2, "w13_weight")
    tensors[w13][1, 3] += 1e-4  # no longer representable in bfloat16; row 3 is an up row
    with caplog.at_level(logging.WARNING):
        found = leaves(load_inkling(write_folder(tmp_path, CONFIG, tensors), dtype=dtype))
    for row, half in enumerate(("gate_proj", "up_proj")):
        leaf = found[f"layers.2.mlp.experts.{half}.weight"]
        assert leaf.dtype == matrices
        assert np.array_equal(np.asarray(leaf), tensors[w13][:, row::2].astype(matrices))
    for name in ("embed.weight", "layers.2.mlp.gate", "layers.0.attn.rel_proj", "layers.1.attn.r_proj.weight"):
        assert found[name].dtype == matrices, name
    for name in (
        "norm.weight",
        "layers.0.attn.k_norm.weight",
        "layers.0.attn_sconv.weight",
        "layers.0.mlp.output_scale",
    ):
        assert found[name].dtype == jnp.float32, name
    assert ("layers.2.mlp.experts.up_proj.weight" in caplog.text) == (dtype == "bfloat16")
    assert "q_proj" not in caplog.text


def add_depths(folder: Path, config: dict[str, Any]) -> Path:
    write_safetensors(folder / "mtp.safetensors", mtp_tensors(config))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_ck15_depths_in_a_file_that_the_index_does_not_name(tmp_path, caplog, shards):
    config = inkling_config(depths=3)
    trunk, depths = inkling_tensors(config), mtp_tensors(config)
    expected = load_inkling(write_folder(tmp_path / "one", config, trunk | depths))
    with caplog.at_level(logging.WARNING):
        model = load_inkling(add_depths(write_folder(tmp_path / "several", config, trunk, shards), config))
    assert model.num_mtp_layers == 3 and not caplog.text
    assert_same_leaves(model, expected)


def test_ck15_an_index_that_forgets_a_depth_and_miscounts(tmp_path):
    """The published index's total is short by one of the depths' tensors: neither it nor the list is proof."""
    config = inkling_config(depths=2)
    folder = add_depths(write_folder(tmp_path, config, inkling_tensors(config), shards=2), config)
    index = json.loads((folder / INDEX).read_text())
    index["metadata"] = {"total_size": 12345}
    for name in mtp_tensors(config):
        if name != "model.mtp.layers.1.input_proj.weight":
            index["weight_map"][name] = "mtp.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    assert load_inkling(folder).num_mtp_layers == 2


def test_ck15_depths_absent_or_fewer(tmp_path, caplog):
    config = inkling_config(depths=3)
    folder = write_folder(tmp_path, config, inkling_tensors(config))
    with caplog.at_level(logging.WARNING):
        model = load_inkling(folder)
    assert model.mtp is None and model.num_mtp_layers == 0
    [notice] = caplog.messages
    assert "0 of the 3 drafting depths" in notice and "without drafting" in notice
    caplog.clear()
    first = {name: array for name, array in mtp_tensors(config).items() if name.startswith("model.mtp.layers.0.")}
    write_safetensors(folder / "mtp.safetensors", first)
    with caplog.at_level(logging.WARNING):
        model = load_inkling(folder)
    assert model.num_mtp_layers == 1 and model.mtp is not None and len(model.mtp.layers) == 1
    [notice] = caplog.messages
    assert "1 of the 3 drafting depths" in notice


def test_depths_stay_bf16_beside_nvfp4(tmp_path):
    config = inkling_config(depths=1)
    tensors = packed(inkling_tensors(config), [3, 4])
    found = leaves(load_inkling(add_depths(write_folder(tmp_path, config, tensors), config)))
    assert found["mtp.layers.0.block.mlp.gate_proj.weight"].dtype == jnp.bfloat16
    assert found["layers.3.mlp.experts.gate_proj.codes"].dtype == jnp.uint16


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_ck13_towers_in_both_spellings(tmp_path, caplog, prefix):
    config = inkling_config(towers=True)
    tensors = inkling_tensors(config)
    expected = load_inkling(write_folder(tmp_path / "released", config, tensors))
    assert expected.vision is not None and expected.audio is not None
    spelled = {
        name.replace("model.visual.", f"{prefix}visual.").replace("model.audio.", f"{prefix}audio."): array
        for name, array in tensors.items()
    }
    folder = write_folder(tmp_path / "spelled", config, spelled)
    assert_same_leaves(load_inkling(folder), expected)
    with caplog.at_level(logging.WARNING):
        text = load_inkling(folder, text_only=True)
    assert text.vision is None and text.audio is None and not caplog.text
    assert leaves(text).keys() == {name for name in leaves(expected) if not name.startswith(("vision.", "audio."))}


def test_ck13_towers_absent(tmp_path, caplog):
    """A config saved again by transformers describes towers that a text checkpoint does not have."""
    config = inkling_config(towers=True)
    text = {
        name: a for name, a in inkling_tensors(config).items() if not name.startswith(("model.visual", "model.aud"))
    }
    with caplog.at_level(logging.WARNING):
        model = load_inkling(write_folder(tmp_path, config, text))
    assert model.vision is None and model.audio is None
    assert len(caplog.messages) == 2 and "pictures" in caplog.text and "sound" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        load_inkling(tmp_path, text_only=True)
    assert not caplog.text


def test_router_dtype(tmp_path, tensors):
    folder = write_folder(tmp_path, CONFIG, tensors)
    assert_same_leaves(load_inkling(folder, router_dtype="float32"), load_inkling(folder))
    with pytest.raises(modeling.CheckpointError, match="routes in float32"):
        load_inkling(folder, router_dtype="bfloat16")


def test_compute_dtype_of_the_nested_config(tmp_path, tensors):
    config = inkling_config(torch_dtype="float32")
    assert load_inkling(write_folder(tmp_path, config, tensors)).dtype == jnp.float32


def test_scales_keep_their_signs(tmp_path, tensors):
    tensors = packed(tensors, [4])
    scales = tensors[EXPERTS.format(4, "w2_weight.scale")]
    assert (scales.view(np.uint8) & 0x80).any() and scales.dtype == E4M3
    mlp = load_inkling(write_folder(tmp_path, CONFIG, tensors), dtype="float32").layers[4].mlp
    assert isinstance(mlp, SinkMoE)
    down = mlp.experts.down_proj
    matrix = np.asarray(down.matrix(jnp.dtype(jnp.float32))) * np.asarray(down.scale())[:, None, None]
    assert np.array_equal(matrix, unpacked(tensors, EXPERTS.format(4, "w2_weight")))
