"""Conversion to Orbax, restoring onto other meshes, and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_writer import (
    F32,
    gguf_tensors,
    released_tensors,
    tiny_config,
    write_folder,
    write_gguf_folder,
)
from inkling_writer import inkling_config, inkling_tensors, mtp_tensors, packed
from loaded_model import assert_same_leaves, leaves, load_inkling, sparse_mlp

import modeling
from modeling.convert import convert, main

CONFIG = tiny_config()
# Everything a model of this kind may have, in numbers that divide over 8 devices.
INKLING = inkling_config(depths=2, towers=True, num_key_value_heads=8, swa_num_key_value_heads=8, intermediate_size=128)

# Each program takes pairs of a checkpoint and where to write, so that one process serves both formats.
PAIRS = """
import sys
import jax, numpy as np
import modeling
from modeling.parameters import parameter_names
from modeling.loading import load, orbax
from modeling.loading.plan import make_plan
from modeling.loading.source import find

devices = len(jax.devices())
mesh = jax.make_mesh((devices,), ("tp",))
pairs = list(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
"""

# Converts from a model that is spread over all devices.
CONVERT = (
    PAIRS
    + """
for source, target in pairs:
    checkpoint = find(source)
    plan = make_plan(checkpoint, "float32", None)
    model = load.fill(plan, checkpoint.path, load.shardings(plan.model, mesh), progress=False)
    orbax.save(model, plan, checkpoint, orbax.Path(target))
"""
)

# Loads onto all devices and saves every leaf, with which are split and how many bytes one device holds.
LOAD = (
    PAIRS
    + """
for source, out in pairs:
    model = modeling.load(source, mesh=mesh, progress=False)
    leaves = dict(zip(parameter_names(model), jax.tree.leaves(model), strict=True))
    assert all(len(leaf.sharding.device_set) == devices for leaf in leaves.values())
    shards = {name: leaf.addressable_shards[0].data for name, leaf in leaves.items()}
    split = [name for name in leaves if shards[name].size * devices == leaves[name].size]
    held = sum(shard.nbytes for shard in shards.values())
    bits = {name: np.asarray(leaf).view(f"u{leaf.dtype.itemsize}") for name, leaf in leaves.items()}
    np.savez(out, split=split, held=held, **bits)
"""
)


def on_devices(count: int, program: str, *pairs: tuple[Path, Path]) -> None:
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}", "JAX_PLATFORMS": "cpu"}
    arguments = [str(path) for pair in pairs for path in pair]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, env=environment)


def write_source(kind: str, folder: Path) -> Path:
    if kind == "safetensors":
        write_folder(folder, CONFIG, released_tensors(CONFIG))
    elif kind == "inkling":
        write_folder(folder, INKLING, packed(inkling_tensors(INKLING), [3, 4]) | mtp_tensors(INKLING))
    else:
        write_gguf_folder(folder, CONFIG, gguf_tensors(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("hello")
    (folder / "spm.model").write_bytes(b"\x00")
    (folder / "notes.txt").write_text("not a part of it")
    return folder


@pytest.fixture
def sources(tmp_path) -> list[Path]:
    return [write_source(kind, tmp_path / kind) for kind in ("safetensors", "gguf", "inkling")]


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_converted_checkpoint_is_the_same_model(kind, tmp_path):
    source, target = write_source(kind, tmp_path / "source"), tmp_path / "converted"
    convert(source, target, progress=False)
    options: dict[str, Any]
    for options in ({}, {"dtype": "float32"}, {"dtype": "bfloat16", "router_dtype": "bfloat16"}):
        restored, loaded = (modeling.load(path, progress=False, **options) for path in (target, source))
        assert_same_leaves(restored, loaded)
        assert restored.dtype == loaded.dtype
        assert restored.weight_format == loaded.weight_format
        assert sparse_mlp(restored).router_dtype == sparse_mlp(loaded).router_dtype
    names = {path.name for path in target.iterdir()}
    assert names == {"state", "firesteel.json", "config.json", "tokenizer.json", "chat_template.jinja", "spm.model"}
    manifest = json.loads((target / "firesteel.json").read_text())
    assert manifest["source"]["fingerprint"].startswith("sha256:")
    assert sum(manifest["source"]["files"].values()) == sum(
        file.stat().st_size for file in source.iterdir() if file.suffix in (".gguf", ".safetensors")
    )


def test_inklings_parts_survive_conversion(tmp_path, caplog):
    source, target = write_source("inkling", tmp_path / "source"), tmp_path / "converted"
    (source / "processor_config.json").write_text("{}")
    (source / "tiktoken").mkdir()
    (source / "tiktoken" / "tokenizer.model").write_bytes(b"\x01")
    convert(source, target, progress=False)
    restored = load_inkling(target)
    assert_same_leaves(restored, load_inkling(source))
    assert restored.expert_formats == ("bf16", "bf16", "bf16", "nvfp4", "nvfp4")
    assert restored.num_mtp_layers == 2 and restored.vision is not None
    assert_same_leaves(load_inkling(target, text_only=True), load_inkling(source, text_only=True))
    assert (target / "tiktoken" / "tokenizer.model").read_bytes() == b"\x01"
    assert (target / "processor_config.json").is_file()
    assert not caplog.text


def test_ck15_a_converted_checkpoint_says_what_it_lacks(tmp_path, caplog):
    write_folder(tmp_path / "source", INKLING, inkling_tensors(INKLING))
    convert(tmp_path / "source", tmp_path / "converted", progress=False)
    caplog.clear()
    assert load_inkling(tmp_path / "converted").mtp is None
    [notice] = caplog.messages
    assert "0 of the 2 drafting depths" in notice


def test_options_that_do_not_fit_the_config(tmp_path):
    convert(write_source("inkling", tmp_path / "source"), tmp_path / "converted", progress=False)
    file = tmp_path / "converted" / "firesteel.json"
    manifest = json.loads(file.read_text())
    for options in (
        {"weight_format": "bf16"},
        {"num_mtp_layers": 3},
        {"expert_formats": ["bf16"]},
        {"vision": [[1, 2]]},
    ):
        file.write_text(json.dumps(manifest | {"options": options}))
        with pytest.raises(modeling.CheckpointError):
            modeling.load(tmp_path / "converted", progress=False)


def test_float32_matrices_stay_so_and_are_rounded_when_restored(tmp_path):
    tensors = {name: array.astype(F32) for name, array in released_tensors(CONFIG).items()}
    tensors["lm_head.weight"] += 1e-4
    convert(write_folder(tmp_path / "source", CONFIG, tensors), tmp_path / "converted", progress=False)
    head = {
        dtype: leaves(modeling.load(tmp_path / "converted", dtype=dtype, progress=False))["lm_head.weight"]
        for dtype in ("float32", "bfloat16")
    }
    assert np.array_equal(np.asarray(head["float32"]), tensors["lm_head.weight"])
    assert np.array_equal(np.asarray(head["bfloat16"]), tensors["lm_head.weight"].astype(jnp.bfloat16))


def assert_found(file: Path, source: Path, share: float) -> None:
    """`file` of `LOAD` holds the source's leaves to the bit; no device has more than `share` of them."""
    expected, found = leaves(modeling.load(source, progress=False)), np.load(file)
    assert set(found.files) - {"split", "held"} == expected.keys()
    for name, leaf in expected.items():
        assert np.array_equal(found[name], np.asarray(leaf).view(f"u{leaf.dtype.itemsize}")), name
    split = {"embed_tokens.weight", "layers.0.self_attn.sinks"}
    if "embed.weight" in expected:
        split = {"embed.weight", "layers.0.attn.k_sconv.weight", "layers.3.mlp.experts.down_proj.scales"}
    assert split <= set(found["split"].tolist())
    assert found["held"] <= share * sum(leaf.nbytes for leaf in expected.values())


def test_ck20_saved_on_8_devices_restored_on_2_and_1(sources, tmp_path):
    targets = [tmp_path / f"{source.name}-converted" for source in sources]
    on_devices(8, CONVERT, *zip(sources, targets, strict=True))
    files = [tmp_path / f"{source.name}.npz" for source in sources]
    on_devices(2, LOAD, *zip(targets, files, strict=True))
    one = jax.make_mesh((1,), ("tp",), devices=jax.devices()[:1])
    for source, target, file in zip(sources, targets, files, strict=True):
        assert_found(file, source, 0.6)
        assert_same_leaves(modeling.load(target, mesh=one, progress=False), modeling.load(source, progress=False))


def test_sources_load_onto_a_mesh_too(sources, tmp_path):
    files = [tmp_path / f"{source.name}.npz" for source in sources]
    on_devices(4, LOAD, *zip(sources, files, strict=True))
    for file, source in zip(files, sources, strict=True):
        assert_found(file, source, 0.4)


@pytest.fixture
def converted(tmp_path) -> Path:
    source = write_folder(tmp_path / "source", CONFIG, released_tensors(CONFIG))
    convert(source, tmp_path / "converted", progress=False)
    return tmp_path / "converted"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax drops a coroutine when it fails
def test_damaged_converted_checkpoints(converted):
    manifest = json.loads((converted / "firesteel.json").read_text())

    def message(**changes) -> str:
        (converted / "firesteel.json").write_text(json.dumps(manifest | changes))
        with pytest.raises(modeling.CheckpointError) as caught:
            modeling.load(converted, progress=False)
        return str(caught.value)

    assert "of format 2; this version reads format 3: convert the checkpoint again" in message(format=2)
    assert "not a manifest" in message(leaves=3)
    assert "not a manifest" in message(more=1)
    fewer = {name: leaf for name, leaf in manifest["leaves"].items() if name != "norm.weight"}
    changed = fewer | {"lm_head.weight": ["int8", [96, 65]], "extra": ["float32", []]}
    faults = message(leaves=changed)
    for fault in (
        "missing leaf: norm.weight",
        "unexpected leaf: extra",
        "shape [96, 65], expected [96, 64]: lm_head.weight",
        "type int8: lm_head.weight",
    ):
        assert fault in faults
    (converted / "firesteel.json").write_text(json.dumps(manifest))
    for file in (converted / "state").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(b"")
    assert "cannot be restored" in message()
    (converted / "state").rename(converted / "elsewhere")
    assert "state/, which holds the weights, is missing" in message()


def test_converted_twice(converted, tmp_path):
    with pytest.raises(modeling.CheckpointError, match="converted checkpoint already"):
        convert(converted, tmp_path / "again")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_target_in_use_is_left_alone(kind, tmp_path, capsys):
    target = tmp_path / "target"
    if kind == "folder":
        target.mkdir()
        (target / "thesis.txt").write_text("precious")
    else:
        target.write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    assert main([str(tmp_path / "source"), str(target)]) == 2
    assert capsys.readouterr().err == f"error: {target} exists and is not an empty folder; nothing was written\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_command_line(tmp_path, capsys):
    """What a user sees: exit codes, one sentence for a mistake, a usable folder after success."""
    source = write_gguf_folder(tmp_path / "source", CONFIG, gguf_tensors(CONFIG))
    (source / "config.json").rename(tmp_path / "config.json")
    command = [sys.executable, "-m", "modeling.convert", source, tmp_path / "out"]
    wrong = subprocess.run(command, capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "no config.json" in wrong.stderr
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    assert main([str(source), str(tmp_path / "out"), "--config", str(tmp_path)]) == 0
    assert "Traceback" not in capsys.readouterr().err
    assert modeling.load(tmp_path / "out", progress=False).weight_format == "nvfp4"


# None in `sys.modules` makes an import fail.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys(({}), None)); "


def run_without(modules: str, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(modules) + program
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, check=True
    )


def test_jx09_help_imports_no_jax():
    program = "from modeling.convert import main\ntry: main(['--help'])\nexcept SystemExit as e: assert e.code == 0"
    assert "SRC" in run_without("'jax', 'flax', 'numpy'", program).stdout


def test_jx09_import_inspection_and_refusal_touch_no_accelerator(sources):
    """With a platform that does not exist, anything that asks JAX for a device fails.

    Nor does it need readers of other formats, or a progress bar.
    """
    program = f"""
import json, pathlib
import modeling, modeling.convert, modeling.loading.load, modeling.loading.orbax, sharding.rules
from modeling.loading.plan import make_plan
from modeling.loading.source import find
for source in map(pathlib.Path, {list(map(str, sources))}):
    assert len(make_plan(find(source), "bfloat16", None).tensors) > 50
    config = json.loads((source / "config.json").read_text())
    for block in (config, config.get("text_config", {{}})): block["hidden_size"] = 128
    (source / "config.json").write_text(json.dumps(config))
    try: modeling.load(source)
    except modeling.CheckpointError as error: print(error)
"""
    modules = "'gguf', 'orbax', 'huggingface_hub', 'tqdm', 'safetensors', 'tokenizers', 'torch'"
    assert run_without(modules, program, JAX_PLATFORMS="nonesuch").stdout.count("no tensor was read") == 3


def test_the_tokenizer_inside_a_gguf_survives(tmp_path):
    from modeling.loading.gguf import read_metadata

    source = Path(__file__).parents[3] / "checkpoints" / "flint-tiny-nvfp4"
    convert(source, tmp_path / "converted", progress=False)
    kept = read_metadata(tmp_path / "converted" / "metadata.gguf")
    assert kept == read_metadata(source / "model-nvfp4.gguf")
    assert kept["tokenizer.huggingface.json"]
    assert (tmp_path / "converted" / "metadata.gguf").stat().st_size < 200_000
