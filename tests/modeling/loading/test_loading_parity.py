"""Loaded models against the logits of the public implementation, and the precision parameters are kept in."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_writer import (
    BF16,
    F32,
    GGUF_BF16,
    GgufTensor,
    fused_tensors,
    gguf_tensors,
    released_tensors,
    tiny_config,
    write_folder,
    write_gguf_folder,
)
from loaded_model import assert_same_leaves, leaves, sparse_mlp

import modeling

FIXTURES = Path(__file__).parents[2] / "fixtures"
CHECKPOINTS = ["flint-bf16", "flint-fused-bf16", "flint-nvfp4-gguf", "flint-small-gguf"]


def load(path, **options):
    return modeling.load(path, progress=False, **options)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_float32_logits(name):
    """1e-5: float32 sums in another order differ by about 1e-6; any wrong byte or name by far more."""
    expected = np.load(FIXTURES / name / "expected.npz")
    model = load(FIXTURES / name, dtype="float32")
    logits = jax.jit(lambda model, ids: model(ids))(model, expected["ids"].astype(np.int32))
    truth = expected["logits_f32"]
    assert np.linalg.norm(logits - truth) <= 1e-5 * np.linalg.norm(truth)


def test_fused_experts_are_the_same_model(tmp_path):
    config = tiny_config()
    tensors = released_tensors(config)
    separate = load(write_folder(tmp_path / "separate", config, tensors))
    fused = load(write_folder(tmp_path / "fused", config, fused_tensors(tensors)))
    assert_same_leaves(separate, fused)


def test_sharded_with_index_is_the_same_model(tmp_path):
    config = tiny_config()
    tensors = released_tensors(config)
    whole = load(write_folder(tmp_path / "whole", config, tensors))
    assert_same_leaves(whole, load(write_folder(tmp_path / "sharded", config, tensors, shards=4)))


def test_every_byte_of_a_plain_checkpoint_arrives(tmp_path):
    config = tiny_config()
    tensors = released_tensors(config)
    found = leaves(load(write_folder(tmp_path / "m", config, tensors)))
    for e in range(config["num_experts"]):
        expert = tensors[f"model.layers.2.mlp.experts.{e}.up_proj.weight"]
        assert np.array_equal(np.asarray(found["layers.2.mlp.experts.up_proj.weight"][e]), expert)
    assert np.array_equal(np.asarray(found["lm_head.weight"]), tensors["lm_head.weight"])
    assert np.array_equal(np.asarray(found["layers.2.mlp.gate"]), tensors["model.layers.2.mlp.gate.weight"])
    assert found["layers.1.self_attn.sinks"].dtype == jnp.float32


@pytest.mark.parametrize(("dtype", "matrices"), [("float32", jnp.float32), ("bfloat16", jnp.bfloat16)])
def test_float32_on_disk(tmp_path, caplog, dtype, matrices):
    """Float32 matrices are rounded for bfloat16 compute, with a warning; norms, sinks and routers stay."""
    config = tiny_config()
    tensors = {name: array.astype(F32) for name, array in released_tensors(config).items()}
    tensors["lm_head.weight"] += 1e-4  # no longer representable in bfloat16
    with caplog.at_level(logging.WARNING):
        found = leaves(load(write_folder(tmp_path / "m", config, tensors), dtype=dtype))
    assert found["lm_head.weight"].dtype == matrices
    assert np.array_equal(np.asarray(found["lm_head.weight"]), tensors["lm_head.weight"].astype(matrices))
    assert found["layers.2.mlp.experts.down_proj.weight"].dtype == matrices
    for name in ("norm.weight", "layers.2.mlp.gate", "layers.0.self_attn.q_norm.weight", "layers.0.self_attn.sinks"):
        assert found[name].dtype == jnp.float32, name
    assert ("lm_head.weight" in caplog.text) == (dtype == "bfloat16")
    assert "q_proj" not in caplog.text  # float32 on disk, but nothing was lost


def test_one_float32_expert_makes_its_stack_float32(tmp_path):
    config = tiny_config()
    tensors = released_tensors(config)
    name = "model.layers.2.mlp.experts.1.up_proj.weight"
    tensors[name] = tensors[name].astype(F32) + np.float32(1e-4)
    stack = leaves(load(write_folder(tmp_path / "m", config, tensors), dtype="float32"))[
        "layers.2.mlp.experts.up_proj.weight"
    ]
    assert stack.dtype == jnp.float32
    assert np.array_equal(np.asarray(stack[1]), tensors[name])
    assert np.array_equal(np.asarray(stack[0]), tensors[name.replace(".1.", ".0.")].astype(F32))


@pytest.mark.parametrize(
    ("disk", "asked", "attribute", "leaf"),
    [
        (F32, None, "float32", jnp.float32),
        (BF16, None, "bfloat16", jnp.bfloat16),
        (F32, "bfloat16", "bfloat16", jnp.bfloat16),
        (BF16, "float32", "float32", jnp.bfloat16),
    ],
)
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_router_dtype(tmp_path, caplog, kind, disk, asked, attribute, leaf):
    config = tiny_config()
    if kind == "safetensors":
        tensors = released_tensors(config)
        tensors["model.layers.2.mlp.gate.weight"] = tensors["model.layers.2.mlp.gate.weight"].astype(disk)
        write_folder(tmp_path, config, tensors)
    else:
        packed = gguf_tensors(config)
        if disk == BF16:
            shape = (config["num_experts"], config["hidden_size"])
            packed["blk.2.ffn_gate_inp.weight"] = GgufTensor(GGUF_BF16, shape, np.ones(shape, BF16).tobytes())
        write_gguf_folder(tmp_path, config, packed)
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, router_dtype=asked)
    assert sparse_mlp(model).router_dtype == attribute
    assert leaves(model)["layers.2.mlp.gate"].dtype == leaf
    assert ("layers.2.mlp.gate" in caplog.text) == (disk == F32 and asked == "bfloat16")


@pytest.mark.parametrize(
    ("written", "asked", "compute"),
    [
        ({"dtype": "float32"}, None, jnp.float32),
        ({"dtype": None, "torch_dtype": "float32"}, None, jnp.float32),
        ({"dtype": "bfloat16"}, None, jnp.bfloat16),
        ({"dtype": "float16"}, None, jnp.bfloat16),
        ({"dtype": None}, None, jnp.bfloat16),
        ({"dtype": "bfloat16"}, "float32", jnp.float32),
        ({"dtype": "float32"}, jnp.bfloat16, jnp.bfloat16),
    ],
)
def test_compute_dtype(tmp_path, written, asked, compute):
    config = tiny_config(**written)
    assert load(write_folder(tmp_path, config, released_tensors(config)), dtype=asked).dtype == compute


@pytest.mark.parametrize(
    "options", [{"dtype": "float16"}, {"dtype": "int8"}, {"dtype": "fp32"}, {"router_dtype": "fp8"}]
)
def test_unsupported_dtypes_are_refused(options):
    with pytest.raises(modeling.CheckpointError, match="must be"):
        load(FIXTURES / "flint-small-gguf", **options)


def test_gguf_takes_its_config_from_elsewhere(tmp_path):
    """Users of the NVFP4 file have config and tokenizer in the BF16 repository."""
    shutil.copy(FIXTURES / "flint-small-gguf" / "model-nvfp4.gguf", tmp_path / "flint.gguf")
    with pytest.raises(modeling.CheckpointError, match=r"flint\.gguf has no config\.json.*as config"):
        load(tmp_path)
    expected = load(FIXTURES / "flint-small-gguf")
    for source in (tmp_path, tmp_path / "flint.gguf"):
        for config in (FIXTURES / "flint-small-gguf", str(FIXTURES / "flint-small-gguf" / "config.json")):
            assert_same_leaves(load(source, config=config), expected)


def test_progress_is_on_stderr_and_can_be_silenced(capfd):
    modeling.load(FIXTURES / "flint-small-gguf")
    captured = capfd.readouterr()
    assert "100%" in captured.err and not captured.out
    load(FIXTURES / "flint-small-gguf")
    assert not any(capfd.readouterr())


def test_config_faults_come_before_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(modeling.CheckpointError, match="llama"):
        load(tmp_path)
