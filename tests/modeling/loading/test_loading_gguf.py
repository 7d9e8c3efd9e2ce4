"""GGUF checkpoints that must be refused, and what the one message says."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_writer import (
    GGUF_BF16,
    GGUF_F16,
    GGUF_F32,
    GGUF_NVFP4,
    GGUF_Q8_0,
    GgufTensor,
    gguf_tensors,
    tiny_config,
    write_gguf,
    write_gguf_folder,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loaded_model import sparse_mlp

import modeling
from modeling.loading import gguf

CONFIG = tiny_config()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture
def tensors() -> dict[str, GgufTensor]:
    return gguf_tensors(CONFIG)


def refusal(folder: Path) -> str:
    """The message that loading the folder ends with; nothing may reach a device."""

    def untouched(*_arguments, **_options):
        raise AssertionError("a device was touched")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_put", untouched)
        with pytest.raises(modeling.CheckpointError) as caught:
            modeling.load(folder, progress=False)
    return str(caught.value)


def floats(*values: float) -> GgufTensor:
    return GgufTensor(GGUF_F32, (len(values),), np.array(values, np.float32).tobytes())


def dequantised(tensor: GgufTensor, scale: np.ndarray) -> np.ndarray:
    """Float64 weights by the format's definition: code, block scale and outer scale, each once."""
    blocks = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape[:-1], tensor.shape[-1] // 64, 36)
    x = (blocks[..., :4] & 0x7F).astype(int)
    block_scales = np.where(x < 8, x / 512, (1 + (x & 7) / 8) * 2.0 ** ((x >> 3) - 7))
    code_bytes = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)
    codes = np.concatenate([code_bytes & 15, code_bytes >> 4], -1)
    weights = (E2M1[codes] * block_scales[..., None]).reshape(tensor.shape)
    return weights * scale.reshape(-1, *[1] * (len(tensor.shape) - 1)).astype(np.float64)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_ck03_bad_global_scales_are_named_by_layer_and_expert(tmp_path, tensors, value):
    tensors["blk.2.ffn_up_exps.scale"] = floats(0.5, value, 0.5, value)
    tensors["blk.0.attn_q.scale"] = floats(value)
    message = refusal(write_gguf_folder(tmp_path, CONFIG, tensors))
    assert "layer 2, experts 1,3: blk.2.ffn_up_exps.scale" in message
    assert "layer 0: blk.0.attn_q.scale" in message
    assert "2 faults" in message


def test_ck03_absent_scales_are_all_named(tmp_path, tensors):
    del tensors["blk.2.ffn_down_exps.scale"], tensors["output.scale"], tensors["blk.1.ffn_up.scale"]
    message = refusal(write_gguf_folder(tmp_path, CONFIG, tensors))
    for name in ("blk.2.ffn_down_exps.scale", "output.scale", "blk.1.ffn_up.scale"):
        assert f"missing global scale of an NVFP4 tensor: {name}" in message


@pytest.mark.parametrize(
    ("name", "leaf"),
    [
        ("blk.2.ffn_{}_exps", "layers.2.mlp.experts"),
        ("blk.2.ffn_{}_shexp", "layers.2.mlp.shared_expert"),
        ("blk.1.ffn_{}", "layers.1.mlp"),
    ],
)
def test_ck05_each_factor_is_applied_once(tmp_path, tensors, name, leaf):
    """Outer scales of 0.5 on down and 2 on gate and up, for routed, shared and dense layers."""
    for part, scale in dict(gate=2.0, up=2.0, down=0.5).items():
        count = 4 if "exps" in name else 1
        tensors[f"{name.format(part)}.scale"] = floats(*[scale * (1 + e / 8) for e in range(count)])
    model = modeling.load(write_gguf_folder(tmp_path, CONFIG, tensors), dtype="float32", progress=False)
    for part in ("gate", "up", "down"):
        module: Any = model
        for step in (*leaf.split("."), f"{part}_proj"):
            module = module[int(step)] if step.isdigit() else getattr(module, step)
        tensor, scale = (tensors[f"{name.format(part)}.{kind}"] for kind in ("weight", "scale"))
        expected = dequantised(tensor, np.frombuffer(scale.data, np.float32))
        for e in range(4) if "exps" in name else [None]:
            weights = module.accumulate(np.eye(tensor.shape[-1], dtype=np.float32), e).T
            assert np.allclose(weights, expected if e is None else expected[e], rtol=1e-6, atol=0)


def test_ck05_gate_and_up_scales_may_differ(tmp_path, tensors):
    tensors["blk.2.ffn_gate_exps.scale"] = floats(0.1, 0.2, 0.3, 0.4)
    tensors["blk.2.ffn_up_exps.scale"] = floats(0.4, 0.3, 0.2, 0.1)
    experts = sparse_mlp(modeling.load(write_gguf_folder(tmp_path, CONFIG, tensors), progress=False)).experts
    assert np.array_equal(experts.gate_proj.global_scale[...], np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    assert np.array_equal(experts.up_proj.global_scale[...], np.array([0.4, 0.3, 0.2, 0.1], np.float32))


def test_ck07_fused_gate_and_up_are_refused_by_name(tmp_path, tensors):
    gate, up = (tensors.pop(f"blk.2.ffn_{part}_exps.weight") for part in ("gate", "up"))
    scale = tensors.pop("blk.2.ffn_gate_exps.scale")
    del tensors["blk.2.ffn_up_exps.scale"]
    experts, width, hidden = gate.shape
    data = b"".join(
        part.data[e * len(part.data) // experts : (e + 1) * len(part.data) // experts]
        for e in range(experts)
        for part in (gate, up)
    )
    tensors["blk.2.ffn_gate_up_exps.weight"] = GgufTensor(GGUF_NVFP4, (experts, 2 * width, hidden), data)
    tensors["blk.2.ffn_gate_up_exps.scale"] = scale
    message = refusal(write_gguf_folder(tmp_path, CONFIG, tensors))
    fused = ", ".join(f"blk.2.ffn_gate_up_exps.{part}" for part in ("scale", "weight"))
    assert f"unexpected tensor: {fused}: gate and up are fused" in message
    assert "missing tensor: blk.2.ffn_gate_exps.weight" in message


def test_ck18_packed_along_the_other_axis(tmp_path, tensors):
    for name in ("blk.0.ffn_down.weight", "blk.2.ffn_up_exps.weight"):
        tensor = tensors[name]
        tensors[name] = tensor._replace(shape=(*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]))
    message = refusal(write_gguf_folder(tmp_path, CONFIG, tensors))
    assert "shape [128, 64], expected [64, 128], the two axes are exchanged: blk.0.ffn_down.weight" in message
    assert "shape [4, 64, 128], expected [4, 128, 64], the two axes are exchanged: blk.2.ffn_up_exps.weight" in message


@pytest.mark.parametrize("value", [True, 7, "blk.0.attn_q.weight", [False, True], [0, 0, 1], ["a"]])
def test_fp4_activations_are_refused(tmp_path, tensors, value):
    message = refusal(write_gguf_folder(tmp_path, CONFIG, tensors, {"general.tensor_extra.prec_a4": value}))
    assert "general.tensor_extra.prec_a4 asks for FP4 activations" in message


@pytest.mark.parametrize("value", [False, 0, [False, False], [0], [""]])
def test_no_fp4_activations_is_fine(tmp_path, tensors, value):
    folder = write_gguf_folder(tmp_path, CONFIG, tensors, {"general.tensor_extra.prec_a4": value})
    assert modeling.load(folder, progress=False).weight_format == "nvfp4"


def test_scale_byte_ff_names_every_tensor_that_has_one(tmp_path, tensors):
    for name in ("blk.0.attn_k.weight", "blk.2.ffn_up_exps.weight", "output.weight"):
        data = bytearray(tensors[name].data)
        data[-36] = 0xFF
        tensors[name] = tensors[name]._replace(data=bytes(data))
    with pytest.raises(modeling.CheckpointError) as caught:
        modeling.load(write_gguf_folder(tmp_path, CONFIG, tensors), progress=False)
    lines = [line for line in str(caught.value).splitlines() if "0xFF" in line]
    assert [line.split(": ")[-1] for line in lines] == [
        "blk.0.attn_k.weight",
        "blk.2.ffn_up_exps.weight",
        "output.weight",
    ]


@pytest.mark.parametrize(
    ("kind", "name"), [(GGUF_F16, "F16"), (GGUF_Q8_0, "Q8_0"), (39, "MXFP4"), (77, "type 77"), (GGUF_NVFP4, "NVFP4")]
)
def test_plain_tensors_must_be_bf16_or_f32(tmp_path, tensors, kind, name):
    tensors["blk.1.attn_norm.weight"] = GgufTensor(kind, (64,), bytes(256))
    message = refusal(write_gguf_folder(tmp_path, CONFIG, tensors))
    assert f"type {name.removeprefix('type ')}" in message
    assert "expected BF16 or F32: blk.1.attn_norm.weight" in message


def test_linear_layers_must_be_nvfp4_the_head_included(tmp_path, tensors):
    for name in ("output.weight", "blk.2.attn_q.weight"):
        shape = tensors[name].shape
        tensors[name] = GgufTensor(GGUF_BF16, shape, bytes(2 * math.prod(shape)))
    message = refusal(write_gguf_folder(tmp_path, CONFIG, tensors))
    for name in ("output.weight", "blk.2.attn_q.weight"):
        assert f"type BF16, expected NVFP4: {name}" in message


def test_scales_must_be_float32_of_the_right_length(tmp_path, tensors):
    tensors["blk.2.ffn_up_exps.scale"] = floats(1, 1, 1)
    tensors["blk.0.attn_q.scale"] = floats(1, 1)
    tensors["blk.0.attn_k.scale"] = GgufTensor(GGUF_BF16, (1,), b"\x80\x3f")
    message = refusal(write_gguf_folder(tmp_path, CONFIG, tensors))
    assert "shape [3], expected [4]: blk.2.ffn_up_exps.scale" in message
    assert "shape [2], expected [1]: blk.0.attn_q.scale" in message
    assert "type BF16, expected F32: blk.0.attn_k.scale" in message


def test_input_width_must_be_a_multiple_of_64(tmp_path):
    config = tiny_config(intermediate_size=96, shared_expert_intermediate_size=32)
    message = refusal(write_gguf_folder(tmp_path, config, gguf_tensors(config)))
    assert "input width 96 is not a multiple of 64: blk.0.ffn_down.weight" in message
    assert "input width 96 is not a multiple of 64: blk.1.ffn_down.weight" in message
    assert "input width 32 is not a multiple of 64: blk.2.ffn_down_shexp.weight" in message
    config = tiny_config(intermediate_size=66)
    message = refusal(write_gguf_folder(tmp_path / "66", config, gguf_tensors(config)))
    assert "NVFP4 needs matrices of a multiple of 16 columns, not 66" in message


def test_every_fault_of_the_headers_is_in_one_message(tmp_path, tensors):
    del tensors["blk.0.attn_v.weight"]
    tensors["blk.9.attn_q.weight"] = tensors["rope_freqs.weight"] = floats(1)
    tensors["blk.1.attn_norm.weight"] = floats(1, 2)
    tensors["blk.1.ffn_norm.weight"] = GgufTensor(GGUF_F16, (64,), bytes(128))
    folder = write_gguf_folder(tmp_path, CONFIG, tensors, {"general.tensor_extra.prec_a4": [True]})
    message = refusal(folder)
    assert str(folder) in message and "6 faults" in message
    for fault in (
        "missing tensor: blk.0.attn_v.weight",
        "unexpected tensor: blk.9.attn_q.weight",
        "unexpected tensor: rope_freqs.weight",
        "shape [2], expected [64]: blk.1.attn_norm.weight",
        "type F16, expected BF16 or F32: blk.1.ffn_norm.weight",
        "prec_a4",
    ):
        assert fault in message


def test_names_of_another_layer_kind_are_unexpected(tmp_path, tensors):
    """A dense tensor in a sparse layer: the layer would otherwise be filled by half."""
    tensors["blk.2.ffn_gate.weight"] = tensors["blk.1.ffn_gate.weight"]
    assert "unexpected tensor: blk.2.ffn_gate.weight" in refusal(write_gguf_folder(tmp_path, CONFIG, tensors))


def test_several_files_are_listed(tmp_path, tensors):
    write_gguf_folder(tmp_path, CONFIG, tensors)
    write_gguf(tmp_path / "other.gguf", tensors)
    assert re.search(r"several \.gguf files \(model\.gguf, other\.gguf\)", refusal(tmp_path))


def test_both_formats_in_one_folder(tmp_path, tensors):
    write_gguf_folder(tmp_path, CONFIG, tensors)
    (tmp_path / "model.safetensors").write_bytes(b"")
    message = refusal(tmp_path)
    assert "both .gguf and .safetensors" in message and "name the file" in message
    assert modeling.load(tmp_path / "model.gguf", progress=False).weight_format == "nvfp4"


@pytest.mark.parametrize(
    ("lies", "says"),
    [
        (dict(magic=b"GGML"), "is not a GGUF file"),
        (dict(version=2), "version 2"),
        (dict(version=3 << 24), "big-endian"),
        (dict(shift=4), "misaligned"),
        (dict(metadata={"general.alignment": 24}), "general.alignment is 24"),
        (dict(metadata={"general.alignment": 0}), "general.alignment is 0"),
        (dict(metadata={"general.alignment": "32"}), "general.alignment is 32"),
        (dict(metadata=[("a", 1), ("a", 1)]), "metadata key a occurs twice"),
    ],
)
def test_damaged_headers(tmp_path, tensors, lies, says):
    message = refusal(write_gguf_folder(tmp_path, CONFIG, tensors, **lies))
    assert says in message and "model.gguf" in message


def test_tensor_named_twice(tmp_path, tensors):
    entries = [*tensors.items(), ("output_norm.weight", tensors["output_norm.weight"])]
    message = refusal(write_gguf_folder(tmp_path, CONFIG, entries))
    assert "tensor output_norm.weight occurs twice in model.gguf" in message


def test_overlapping_tensors(tmp_path, tensors):
    folder = write_gguf_folder(tmp_path, CONFIG, tensors, shift=-32)
    assert "overlap" in refusal(folder)


def test_other_alignments_load(tmp_path, tensors):
    a = modeling.load(write_gguf_folder(tmp_path / "a", CONFIG, tensors), progress=False)
    folder = write_gguf_folder(tmp_path / "b", CONFIG, tensors, {"general.alignment": 256}, alignment=256)
    b = modeling.load(folder, progress=False)
    assert all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def test_a_tokenizer_in_the_metadata_is_skipped(tmp_path, tensors):
    metadata = {"tokenizer.ggml.tokens": ["a", "b" * 70000, ""], "tokenizer.ggml.scores": [1, 2, 3], "k": "v" * 70000}
    assert modeling.load(write_gguf_folder(tmp_path, CONFIG, tensors, metadata), progress=False)


@pytest.mark.parametrize("fraction", [0, 1e-4, 1e-3, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_truncated(tmp_path, tensors, fraction):
    file = write_gguf_folder(tmp_path, CONFIG, tensors) / "model.gguf"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * fraction)])
    assert re.search(r"model\.gguf (is truncated|is not a GGUF)", refusal(tmp_path))


def test_truncated_inside_the_header_at_every_length(tmp_path, tensors):
    small = {name: tensors[name] for name in ("output.weight", "output.scale")}
    file = write_gguf_folder(tmp_path, CONFIG, small, {"general.tensor_extra.prec_a4": [False]}) / "model.gguf"
    data = file.read_bytes()
    header = len(data) - sum(-(-len(tensor.data) // 32) * 32 for tensor in small.values())
    for length in range(header - 31):  # the last up to 31 bytes are padding
        file.write_bytes(data[:length])
        with pytest.raises(modeling.CheckpointError, match=r"model\.gguf"):
            gguf.read_header(file)


@pytest.mark.parametrize("position", [8, 16])  # the counts of tensors and of metadata keys
@pytest.mark.parametrize("count", [1 << 20, 1 << 40, (1 << 64) - 1])
def test_counts_that_no_file_could_hold(tmp_path, tensors, position, count):
    file = write_gguf_folder(tmp_path, CONFIG, tensors) / "model.gguf"
    data = bytearray(file.read_bytes())
    data[position : position + 8] = struct.pack("<Q", count)
    file.write_bytes(data)
    assert "model.gguf" in refusal(tmp_path)


@given(st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fuzzed_headers_end_in_a_result_or_a_checkpoint_error(tmp_path, data):
    tensors = gguf_tensors(CONFIG)
    small = {name: tensors[name] for name in ("output.weight", "output.scale", "token_embd.weight")}
    write_gguf(tmp_path / "x.gguf", small, {"general.alignment": 32, "general.tensor_extra.prec_a4": [True, False]})
    raw = bytearray((tmp_path / "x.gguf").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 330))] = data.draw(st.integers(0, 255))
    (tmp_path / "x.gguf").write_bytes(raw)
    try:
        found, _metadata, faults = gguf.read_header(tmp_path / "x.gguf")
    except modeling.CheckpointError as error:
        assert "x.gguf" in str(error)
    else:
        inside = all(info.offset + info.nbytes <= len(raw) for info in found.values())
        assert inside or faults


def test_config_and_file_of_different_models(tmp_path, tensors):
    folder = write_gguf_folder(tmp_path, CONFIG, tensors)
    (folder / "config.json").write_text(json.dumps(tiny_config(hidden_size=128, num_experts=5)))
    message = refusal(folder)
    assert "shape [96, 64], expected [96, 128]: token_embd.weight" in message
    assert "shape [4], expected [5]: blk.2.ffn_up_exps.scale" in message
