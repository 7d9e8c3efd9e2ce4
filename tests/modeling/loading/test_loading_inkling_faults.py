"""Inkling checkpoints that must be refused, and what the one message says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_writer import BF16, F32, Tensors, gguf_tensors, tiny_config, write_folder, write_gguf_folder
from inkling_writer import E4M3, compressed, inkling_config, inkling_tensors, mtp_tensors, packed, stacks
from loaded_model import leaves, load_inkling, refusal

import modeling

CONFIG = inkling_config()
W13, W2 = stacks([3])
LAYER = "model.llm.layers.{}."


@pytest.fixture
def tensors() -> Tensors:
    return inkling_tensors(CONFIG)


def load_refusal(folder: Path) -> str:
    """The message of a fault that only reading can show."""
    with pytest.raises(modeling.CheckpointError) as caught:
        modeling.load(folder, progress=False)
    return str(caught.value)


def test_every_fault_of_the_headers_is_in_one_message(tmp_path, tensors):
    del tensors["model.llm.embed_norm.weight"], tensors[LAYER.format(2) + "mlp.gate.bias"]
    tensors["model.llm.layers.9.attn.wq_du.weight"] = tensors[LAYER.format(0) + "attn.wq_du.weight"]
    tensors["model.llm.layers.0.attn.rel_logits_proj.proj.weight"] = tensors["model.llm.norm.weight"]
    rel = LAYER.format(3) + "attn.rel_logits_proj.proj"
    tensors[rel] = np.ascontiguousarray(tensors[rel].T)
    dense = LAYER.format(0) + "mlp.w13_dn.weight"
    tensors[dense] = tensors[dense][:-1]
    sconv = LAYER.format(1) + "attn.k_sconv.weight"
    tensors[sconv] = tensors[sconv][:, 0]
    shared = LAYER.format(4) + "mlp.shared_experts.shared_w2_weight"
    tensors[shared] = tensors[shared].astype(np.float16)
    message = refusal(write_folder(tmp_path, CONFIG, tensors))
    for fault in (
        "missing tensor: model.llm.embed_norm.weight",
        "missing tensor: model.llm.layers.2.mlp.gate.bias",
        "unexpected tensor: model.llm.layers.9.attn.wq_du.weight",
        "unexpected tensor: model.llm.layers.0.attn.rel_logits_proj.proj.weight",
        f"shape [16, 4], expected [4, 16], the two axes are exchanged: {rel}",
        f"shape [255, 64], expected [256, 64]: {dense}",
        f"shape [64, 4], expected [64, 1, 4]: {sconv}",
        f"type F16, expected BF16 or F32: {shared}",
    ):
        assert fault in message
    assert "8 faults" in message


def renamed_by_transformers(name: str) -> str:
    name = name.replace("model.llm.layers.", "model.language_model.layers.").replace(".attn.", ".self_attn.")
    return name.replace("model.llm.", "model.language_model.").replace("w13_weight", "gate_up_proj")


LAYOUTS = {
    "transformers": (renamed_by_transformers, "save_original_format=True"),
    "mlx": (
        lambda name: name.replace("model.llm.", "language_model.").replace("experts", "switch_mlp"),
        "MLX's layout",
    ),
    "adapter": (lambda name: f"base_model.model.{name}.lora_A", "an adapter"),
    "unknown": (lambda name: f"decoder/{name}", "as it was released"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ck11_other_layouts_are_named_with_sample_keys(tmp_path, tensors, layout):
    rename, words = LAYOUTS[layout]
    other = {rename(name): array for name, array in tensors.items()}
    message = refusal(write_folder(tmp_path, CONFIG, other))
    assert words in message and "another layout" in message
    assert len(message.splitlines()) == 2  # and not every tensor twice
    assert min(other) in message and "looked for model.llm.embed.weight" in message


def test_ck11_experts_in_another_arrangement(tmp_path, tensors):
    """One tensor an expert, in an otherwise released checkpoint."""
    stack = tensors.pop(LAYER.format(2) + "mlp.experts.w13_weight")
    for e, expert in enumerate(stack):
        tensors[LAYER.format(2) + f"mlp.experts.{e}.w13.weight"] = expert
    message = refusal(write_folder(tmp_path, CONFIG, tensors))
    assert "missing tensor: model.llm.layers.2.mlp.experts.w13_weight" in message
    assert "mlp.experts.0.w13.weight, model.llm.layers.2.mlp.experts.1.w13.weight" in message
    assert "and 1 more: experts are read as they are released" in message
    assert len(message.splitlines()) == 3


def test_ck11_a_layer_packed_in_part(tmp_path, tensors):
    """w13 packed and w2 not: the layer's format is one, and what contradicts it is named."""
    both = packed(tensors, [3])
    mixed = {name: array for name, array in both.items() if not name.startswith(W2)} | {W2: tensors[W2]}
    message = refusal(write_folder(tmp_path, CONFIG, mixed))
    assert f"type BF16, expected U8: {W2}" in message
    assert f"missing tensor: {W2}.scale\n" in message + "\n"
    assert f"missing global scale of an NVFP4 tensor: {W2}.scale2" in message


@pytest.mark.parametrize("name", [W13, W2])
def test_ck18_packed_along_the_other_axis(tmp_path, tensors, name):
    tensors = packed(tensors, [3])
    tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    message = refusal(write_folder(tmp_path, CONFIG, tensors))
    experts, rows, columns = tensors[name].shape
    expected = (
        f"shape [{experts}, {rows}, {columns}], expected [{experts}, {columns}, {rows}], the two axes are exchanged"
    )
    assert f"{expected}: {name}" in message


def test_ck03_absent_scales(tmp_path, tensors):
    tensors = packed(tensors, [3])
    del tensors[f"{W13}.scale2"]
    message = refusal(write_folder(tmp_path, CONFIG, tensors))
    assert f"missing global scale of an NVFP4 tensor: {W13}.scale2" in message


@pytest.mark.parametrize("value", [0, -1, np.inf, np.nan])
def test_ck03_unusable_global_scales_name_layer_and_experts(tmp_path, tensors, value):
    tensors = packed(tensors, [3, 4])
    tensors[f"{W13}.scale2"][[0, 1, 3]] = value
    tensors["model.llm.layers.4.mlp.experts.w2_weight.scale2"][2] = value
    message = load_refusal(write_folder(tmp_path, CONFIG, tensors))
    assert f"layer 3, experts 0-1,3: {W13}.scale2 must be positive and finite" in message
    assert "layer 4, experts 2: model.llm.layers.4.mlp.experts.w2_weight.scale2" in message
    assert "no weight was read" in message and "2 faults" in message


@pytest.mark.parametrize("value", [0, -1, np.inf, np.nan, 1e-45])
def test_ck03_unusable_scales_that_divide(tmp_path, tensors, value):
    tensors = compressed(packed(tensors, [3, 4]), [3, 4], flat=False)
    tensors[f"{W2}.weight_global_scale"][2] = value
    message = load_refusal(write_folder(tmp_path, CONFIG, tensors))
    assert f"layer 3, experts 2: {W2}.weight_global_scale must be positive and finite" in message


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("name", [W13, W2])
def test_block_scales_that_are_no_numbers(tmp_path, tensors, byte, name):
    tensors = packed(tensors, [3, 4])
    tensors[f"{name}.scale"].view(np.uint8)[3, 5, 1] = byte
    message = load_refusal(write_folder(tmp_path, CONFIG, tensors))
    [line] = message.splitlines()[1:]
    assert "block scale that is no E4M3 number" in line and line.endswith(f"{name}.scale")


def test_block_scales_of_another_type(tmp_path, tensors):
    tensors = packed(tensors, [3])
    tensors[f"{W2}.scale"] = tensors[f"{W2}.scale"].view(np.uint8)
    assert f"type U8, expected F8_E4M3: {W2}.scale" in refusal(write_folder(tmp_path, CONFIG, tensors))


def test_both_spellings_of_one_stack(tmp_path, tensors):
    tensors = packed(tensors, [3])
    both = tensors | compressed(tensors, [3], flat=True)
    message = refusal(write_folder(tmp_path, CONFIG, both))
    assert "unexpected tensor" in message and "w13_weight_packed" in message


def test_ck15_more_depths_than_described(tmp_path):
    config = inkling_config(depths=3)
    tensors = inkling_tensors(config) | mtp_tensors(config)
    config["mtp_config"] |= dict(num_nextn_predict_layers=2, local_layer_ids=[0])
    message = refusal(write_folder(tmp_path / "two", config, tensors))
    assert "model.mtp.layers.2." in message and "and 17 more: config.json describes 2 drafting depths" in message
    del config["mtp_config"]
    assert "and 57 more: config.json describes 0 drafting depths" in refusal(
        write_folder(tmp_path / "no", config, tensors)
    )


def test_ck15_a_depth_with_a_hole(tmp_path):
    config = inkling_config(depths=3)
    depths = {name: array for name, array in mtp_tensors(config).items() if "layers.1.hidden_norm" not in name}
    message = refusal(write_folder(tmp_path, config, inkling_tensors(config) | depths))
    assert "missing tensor: model.mtp.layers.1.hidden_norm.weight" in message
    depths = {name: array for name, array in mtp_tensors(config).items() if ".layers.0." not in name}
    message = refusal(write_folder(tmp_path, config, inkling_tensors(config) | depths))
    assert "missing tensor: model.mtp.layers.0.hidden_norm.weight" in message


def test_chain_norm_goes_with_its_field(tmp_path):
    config = inkling_config(depths=1)
    tensors = inkling_tensors(config) | mtp_tensors(config)
    norm = {"model.mtp.chain_norm.weight": np.full(64, 1.5, BF16)}
    assert "unexpected tensor: model.mtp.chain_norm.weight" in refusal(write_folder(tmp_path, config, tensors | norm))
    config["mtp_config"]["chain_hidden_post_norm"] = True
    assert "missing tensor: model.mtp.chain_norm.weight" in refusal(write_folder(tmp_path, config, tensors))
    model = load_inkling(write_folder(tmp_path, config, tensors | norm))
    assert np.asarray(leaves(model)["mtp.chain_norm.weight"])[3] == 1.5


def test_ck13_towers_that_the_config_does_not_describe(tmp_path):
    tensors = inkling_tensors(inkling_config(towers=True))
    folder = write_folder(tmp_path, CONFIG, tensors)
    message = refusal(folder)
    assert "config.json has no vision_config" in message and "config.json has no audio_config" in message
    assert load_inkling(folder, text_only=True).vision is None


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model.visual.layers.linear_1.weight": None}, "of the vision tower: model.visual.layers.linear_1.weight"),
        ({"model.visual.final_norm.weight": None}, "missing tensor: model.visual.final_norm.weight"),
        ({"model.audio.final_norm.weight": None}, "missing tensor: model.audio.final_norm.weight"),
        ({"model.audio.encoder.weight": (79, 64)}, "shape [79, 64], expected [80, 64]"),
        ({"model.visual.layers.linear_1.weight": (63, 192)}, "the last of 64 rows"),
        ({"model.visual.layers.linear_1.weight": (64,)}, "must be matrices"),
        ({"model.visual.layers.linear_0.weight": (24, 47)}, "vision tower layer 0"),
        ({"model.visual.layers.linear_0.weight": (24, 12)}, "vision tower"),
        ({"model.visual.layers.norm_0.weight": (23,)}, "shape [23], expected [24]"),
    ],
)  # fmt: skip
def test_faults_of_towers(tmp_path, change, words):
    config = inkling_config(towers=True)
    tensors = inkling_tensors(config)
    for name, shape in change.items():
        tensors.pop(name)
        if shape is not None:
            tensors[name] = np.ones(shape, BF16)
    assert words in refusal(write_folder(tmp_path, config, tensors))


def test_a_truncated_shard_is_the_only_fault(tmp_path):
    """What its tensors would have been is not guessed at."""
    config = inkling_config(depths=1, towers=True)
    folder = write_folder(tmp_path, config, inkling_tensors(config) | mtp_tensors(config), shards=4)
    (folder / "model-00002-of-00004.safetensors").write_bytes(b"\x10")
    message = refusal(folder)
    assert "model-00002-of-00004.safetensors is truncated" in message
    assert "missing tensor" not in message and "vision" not in message


@pytest.mark.parametrize(
    "quantization",
    [
        {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "none",
            "group_size": 16,
            "exclude_modules": ["model.llm.embed"],
        },
        {"quant_algo": "NVFP4"},
        {},
    ],
)
def test_nvfp4_needs_no_producer(tmp_path, tensors, quantization):
    folder = write_folder(tmp_path, CONFIG, packed(tensors, [3]))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    assert load_inkling(folder).expert_formats[3] == "nvfp4"


@pytest.mark.parametrize(
    "block",
    [
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"quant_method": "modelopt"},
    ],
)
def test_quantization_config_of_nvfp4(tmp_path, tensors, block):
    config: dict[str, Any] = CONFIG | {"quantization_config": block}
    assert load_inkling(write_folder(tmp_path, config, tensors)).expert_formats[3] == "bf16"


@pytest.mark.parametrize(
    "place, block, words",
    [
        ("hf", {"quant_algo": "FP8"}, "hf_quant_config.json says that weights are quantised as 'FP8'"),
        ("hf", {"quant_algo": "MIXED_PRECISION"}, "'MIXED_PRECISION'"),
        ("hf", {"quant_algo": "NVFP4", "group_size": 32}, "hf_quant_config.json has group_size 32"),
        ("config", {"quant_method": "fp8"}, "config.json says that weights are quantised as 'fp8'"),
        ("config", {"quant_method": "compressed-tensors", "format": "float-quantized"}, "'float-quantized'"),
        ("config", {"quant_method": "awq"}, "'awq'"),
        ("text", {"quant_method": "gptq"}, "config.json, text_config says that weights are quantised as 'gptq'"),
    ],
)
def test_other_quantisations_are_refused_in_a_sentence(tmp_path, tensors, place, block, words):
    config = inkling_config(**({"quantization_config": block} if place == "text" else {}))
    if place == "config":
        config["quantization_config"] = block
    folder = write_folder(tmp_path, config, tensors)
    if place == "hf":
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": block}))
    message = refusal(folder)
    assert words in message and len(message.splitlines()) == 2


def test_gguf_is_flints(tmp_path):
    folder = write_gguf_folder(tmp_path, CONFIG, gguf_tensors(tiny_config()))
    assert "safetensors files only" in refusal(folder)


def test_float32_block_scales_are_refused(tmp_path, tensors):
    tensors = packed(tensors, [3])
    tensors[f"{W2}.scale"] = tensors[f"{W2}.scale"].astype(F32)
    assert tensors[f"{W13}.scale"].dtype == E4M3
    assert f"type F32, expected F8_E4M3: {W2}.scale" in refusal(write_folder(tmp_path, CONFIG, tensors))
