"""Safetensors checkpoints that must be refused, and what the one message says."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from checkpoint_writer import (
    BF16,
    F32,
    Tensors,
    fused_tensors,
    released_tensors,
    safetensors_header,
    tiny_config,
    write_folder,
    write_safetensors,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loaded_model import refusal

import modeling
from modeling.loading import load, safetensors

CONFIG = tiny_config()
INDEX = "model.safetensors.index.json"
NORM, GATE = "model.norm.weight", "model.layers.2.mlp.gate.weight"
EXPERT = "model.layers.2.mlp.experts.{}.{}.weight"


@pytest.fixture
def tensors() -> Tensors:
    return released_tensors(CONFIG)


def change_index(folder: Path, **changes: str | None) -> None:
    """Edits the index: tensor -> file, None removes the tensor."""
    index = json.loads((folder / INDEX).read_text())
    for name, file in changes.items():
        index["weight_map"].pop(name, None)
        if file is not None:
            index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


def test_ck01_every_absent_shard_is_named(tmp_path, tensors):
    folder = write_folder(tmp_path, CONFIG, tensors, shards=5)
    for shard in (2, 4):
        (folder / f"model-0000{shard}-of-00005.safetensors").unlink()
    message = refusal(folder)
    assert "files that are not in the folder (2)" in message
    assert "model-00002-of-00005.safetensors, model-00004-of-00005.safetensors" in message
    assert "missing tensor" not in message  # they may well be in the absent files


def test_ck01_only_an_index(tmp_path, tensors):
    folder = write_folder(tmp_path, CONFIG, tensors, shards=2)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors" in refusal(folder)


def test_tensor_that_is_not_where_the_index_says(tmp_path, tensors):
    folder = write_folder(tmp_path, CONFIG, tensors, shards=2)
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    elsewhere = {one: two, two: one}[index[NORM]]
    change_index(folder, **{NORM: elsewhere, "model.extra": one, GATE: None})
    message = refusal(folder)
    assert f"tensor {NORM} is in {index[NORM]}, but {INDEX} says {elsewhere}" in message
    assert f"tensor model.extra is not in {one}, where {INDEX} says it is" in message
    assert f"tensor {GATE} is in {index[GATE]} but not in {INDEX}" in message


def test_tensor_in_two_files(tmp_path, tensors):
    folder = write_folder(tmp_path, CONFIG, tensors)
    write_safetensors(folder / "more.safetensors", {NORM: tensors[NORM]})
    assert f"tensor {NORM} is in both model.safetensors and more.safetensors" in refusal(folder)


@pytest.mark.parametrize(
    "index",
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": ""}}', "\xff"],
)
def test_damaged_index(tmp_path, tensors, index):
    folder = write_folder(tmp_path, CONFIG, tensors, shards=2)
    (folder / INDEX).write_text(index, encoding="latin-1")
    assert INDEX in refusal(folder)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "sub/a.safetensors", ".."])
def test_index_may_not_leave_the_folder(tmp_path, tensors, file):
    folder = write_folder(tmp_path / "m", CONFIG, tensors, shards=2)
    write_safetensors(tmp_path / "secret.safetensors", tensors)
    change_index(folder, **{NORM: file})
    assert "files in this folder" in refusal(folder)


def test_files_beside_the_index_are_left_alone(tmp_path, tensors):
    folder = write_folder(tmp_path, CONFIG, tensors, shards=2)
    write_safetensors(folder / "consolidated.safetensors", tensors)
    assert modeling.load(folder, progress=False).weight_format == "bf16"


def test_several_files_without_an_index(tmp_path, tensors):
    folder = write_folder(tmp_path, CONFIG, tensors, shards=3)
    (folder / INDEX).unlink()
    assert modeling.load(folder, progress=False).weight_format == "bf16"


def test_every_fault_of_the_headers_is_in_one_message(tmp_path, tensors):
    del tensors[NORM], tensors[EXPERT.format(3, "up_proj")]
    tensors["model.layers.7.mlp.gate.weight"] = tensors[GATE]
    tensors["lm_head.bias"] = np.zeros(96, BF16)
    tensors[EXPERT.format(1, "down_proj")] = tensors[EXPERT.format(1, "down_proj")].T.copy()
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:95]
    tensors[GATE] = tensors[GATE].astype(np.float16)
    folder = write_folder(tmp_path, CONFIG, tensors)
    message = refusal(folder)
    assert str(folder) in message and "7 faults" in message
    for fault in (
        f"missing tensor: {NORM}",
        f"missing tensor: {EXPERT.format(3, 'up_proj')}",
        "unexpected tensor: model.layers.7.mlp.gate.weight",
        "unexpected tensor: lm_head.bias",
        f"shape [128, 64], expected [64, 128], the two axes are exchanged: {EXPERT.format(1, 'down_proj')}",
        "shape [95, 64], expected [96, 64]: model.embed_tokens.weight",
        f"type F16, expected BF16 or F32: {GATE}",
    ):
        assert fault in message


def test_many_missing_experts_are_summarised_by_layer(tmp_path):
    config = tiny_config(num_experts=40, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    tensors = released_tensors(config)
    kept = {name: array for name, array in tensors.items() if ".experts." not in name or ".experts.7." in name}
    message = refusal(write_folder(tmp_path, config, kept))
    for layer in (2, 3):
        for part in ("gate_proj", "up_proj", "down_proj"):
            line = f"missing tensor: model.layers.{layer}.mlp.experts.{{0-6,8-39}}.{part}.weight (39 tensors)"
            assert line in message
    assert len(message.splitlines()) == 1 + 6


def test_fused_and_separate_experts_together(tmp_path, tensors):
    """Which of the two is meant cannot be told: neither is taken silently."""
    message = refusal(write_folder(tmp_path, CONFIG, tensors | fused_tensors(tensors)))
    assert f"unexpected tensor: {EXPERT.format(0, 'gate_proj')}" in message


def test_ck18_fused_experts_along_the_other_axis(tmp_path, tensors):
    fused = fused_tensors(tensors)
    name = "model.layers.2.mlp.experts.gate_up_proj"
    fused[name] = np.ascontiguousarray(fused[name].swapaxes(1, 2))
    message = refusal(write_folder(tmp_path, CONFIG, fused))
    assert f"shape [4, 64, 256], expected [4, 256, 64], the two axes are exchanged: {name}" in message


def test_both_spellings_of_the_sinks_together(tmp_path, tensors):
    tensors["model.layers.0.self_attn.sinks"] = tensors["model.layers.0.self_attn.softmax_offset"]
    message = refusal(write_folder(tmp_path, CONFIG, tensors))
    assert "unexpected tensor: model.layers.0.self_attn.softmax_offset" in message


def test_truncated_at_many_lengths(tmp_path, tensors):
    file = write_folder(tmp_path, CONFIG, tensors) / "model.safetensors"
    data = file.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    lengths = {0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(data) // 2, len(data) - 1}
    for length in sorted(lengths):
        file.write_bytes(data[:length])
        message = refusal(tmp_path)
        assert "model.safetensors is truncated" in message, length
        assert message.count("\n") == 1, message  # and not a thousand missing tensors on top


def test_truncated_file_among_other_faults(tmp_path, tensors):
    """A cut file still has its header: what it shows is reported with the truncation."""
    del tensors[NORM]
    file = write_folder(tmp_path, CONFIG, tensors) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    message = refusal(tmp_path)
    assert "model.safetensors is truncated" in message
    assert f"missing tensor: {NORM}" in message


def test_bytes_after_the_last_tensor(tmp_path, tensors):
    file = write_folder(tmp_path, CONFIG, tensors) / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    assert "1 bytes after its last tensor" in refusal(tmp_path)


def lie(entry: str, value: object):
    def change(header: dict) -> None:
        header[NORM][entry] = value

    return change


LIES = {
    "size": lie("data_offsets", [0, 1]),
    "negative": lie("data_offsets", [-128, 0]),
    "backwards": lie("data_offsets", [128, 0]),
    "overlap": lie("data_offsets", [2, 130]),
    "far away": lie("data_offsets", [1 << 40, (1 << 40) + 128]),
    "three offsets": lie("data_offsets", [0, 64, 128]),
    "offsets of floats": lie("data_offsets", [0.0, 128.0]),
    "shape": lie("shape", [65]),
    "huge shape": lie("shape", [1 << 62, 1 << 62]),
    "shape of a string": lie("shape", "64"),
    "shape of bools": lie("shape", [True, 64]),
    "type": lie("dtype", "BF17"),
    "type of a number": lie("dtype", 16),
    "no entry": lambda header: header.update({NORM: None}),
    "entry is a list": lambda header: header.update({NORM: []}),
}


@pytest.mark.parametrize("change", LIES.values(), ids=LIES.keys())
def test_headers_that_lie(tmp_path, tensors, change):
    folder = write_folder(tmp_path, CONFIG, tensors)
    header = safetensors_header(tensors)
    change(header)
    write_safetensors(folder / "model.safetensors", tensors, json.dumps(header).encode())
    message = refusal(folder)
    assert "model.safetensors" in message and "tensor " in message


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": 1}'])
def test_headers_that_are_not_headers(tmp_path, tensors, header):
    folder = write_folder(tmp_path, CONFIG, tensors)
    write_safetensors(folder / "model.safetensors", tensors, header)
    assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize("length", [1 << 20, 1 << 40, 1 << 63, (1 << 64) - 1])
def test_header_longer_than_the_file(tmp_path, tensors, length):
    file = write_folder(tmp_path, CONFIG, tensors) / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    assert "model.safetensors is truncated or not safetensors" in refusal(tmp_path)


def test_tensor_twice_in_one_header(tmp_path, tensors):
    raw = json.dumps(safetensors_header(tensors))
    entry = json.dumps({NORM: safetensors_header(tensors)[NORM]})[1:-1]
    folder = write_folder(tmp_path, CONFIG, tensors)
    write_safetensors(folder / "model.safetensors", tensors, (raw[:-1] + ", " + entry + "}").encode())
    assert f"it names {NORM} twice" in refusal(folder)


def test_every_broken_file_is_named(tmp_path, tensors):
    folder = write_folder(tmp_path, CONFIG, tensors, shards=3)
    for shard in (1, 3):
        (folder / f"model-0000{shard}-of-00003.safetensors").write_bytes(b"\x10")
    message = refusal(folder)
    assert "model-00001-of-00003.safetensors is truncated" in message
    assert "model-00003-of-00003.safetensors is truncated" in message


def test_a_file_that_shrinks_while_it_is_read(tmp_path, tensors, monkeypatch):
    folder = write_folder(tmp_path, CONFIG, tensors)
    file, check = folder / "model.safetensors", load.check_global_scales

    def shrink(*arguments):
        file.write_bytes(file.read_bytes()[:-1000])
        return check(*arguments)

    monkeypatch.setattr(load, "check_global_scales", shrink)
    with pytest.raises(modeling.CheckpointError, match="changed while being read"):
        modeling.load(folder, progress=False)


def test_metadata_and_padding_are_allowed(tmp_path):
    tensors = {"a": np.arange(3, dtype=F32), "empty": np.zeros((0, 4), BF16)}
    header = {"__metadata__": {"format": "pt"}, **safetensors_header(tensors)}
    write_safetensors(tmp_path / "x.safetensors", tensors, json.dumps(header).encode() + b"   ")
    infos = {info.name: info for info in safetensors.read_header(tmp_path / "x.safetensors")}
    assert infos["a"].shape == (3,) and infos["a"].dtype == "F32" and infos["a"].nbytes == 12
    assert infos["empty"].shape == (0, 4) and infos["empty"].nbytes == 0


@given(st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fuzzed_files_end_in_a_result_or_a_checkpoint_error(tmp_path, data):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": np.arange(3, dtype=F32), "b": np.zeros((2, 2), BF16)})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        infos = safetensors.read_header(path)
    except modeling.CheckpointError as error:
        assert "x.safetensors" in str(error)
    else:
        inside = all(info.offset + info.nbytes <= len(raw) for info in infos)
        assert inside or safetensors.truncation(path, infos)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 65) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), _JSON), _JSON)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fuzzed_entries_end_in_a_checkpoint_error(tmp_path, changes, other):
    tensors = {"a": np.arange(3, dtype=F32)}
    entry = safetensors_header(tensors)["a"] | changes
    path = tmp_path / "x.safetensors"
    write_safetensors(path, tensors, json.dumps({"a": entry, "b": other}).encode())
    with pytest.raises(modeling.CheckpointError, match=r"x\.safetensors"):
        safetensors.read_header(path)
