"""Finding a checkpoint: folders, files and hub repositories."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest

import modeling
from modeling.loading.source import find, resolve

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that has one repository; records what it was asked for."""
    asked = []

    def snapshot_download(repo, *, revision, allow_patterns):
        asked.append((repo, revision, allow_patterns))
        if repo != "acme/flint":
            raise ConnectionError("no route\nto host")
        return str(FIXTURES / "flint-small-gguf")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return asked


def test_what_is_on_disk_is_never_looked_up(hub, tmp_path):
    (tmp_path / "acme" / "flint").mkdir(parents=True)
    assert resolve("acme/flint") == Path("acme/flint")
    assert resolve(tmp_path) == tmp_path
    assert not hub


def test_repository_is_fetched(hub):
    assert modeling.load("acme/flint", progress=False).weight_format == "nvfp4"
    [(repo, revision, patterns)] = hub
    assert (repo, revision) == ("acme/flint", None)
    assert {"*.gguf", "*.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"} <= set(patterns)


def test_revision(hub):
    resolve("acme/flint@refs/pr/1")
    assert hub[0][:2] == ("acme/flint", "refs/pr/1")


def test_without_weights_only_small_files_are_fetched(hub):
    resolve("acme/flint", weights=False)
    patterns = set(hub[0][2])
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= patterns
    assert not {"*.gguf", "*.safetensors"} & patterns


def test_config_from_a_repository(hub, tmp_path):
    shutil.copy(FIXTURES / "flint-small-gguf" / "model-nvfp4.gguf", tmp_path / "a.gguf")
    assert find(tmp_path / "a.gguf", "acme/flint").config.num_experts == 3
    assert "*.gguf" not in hub[0][2]


def test_hub_that_fails_is_one_sentence(hub):
    with pytest.raises(modeling.CheckpointError, match=r"acme/other does not exist, and .* hub either: no route$"):
        resolve("acme/other")


def test_hub_library_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(modeling.CheckpointError, match="install huggingface_hub"):
        resolve("acme/flint")


@pytest.mark.parametrize("path", ["/no/such/folder", "./a/b", "a/b/c", "flint", "a/b.gguf/..", "~/nothing here", ""])
def test_paths_that_cannot_be_repositories(hub, path):
    with pytest.raises(modeling.CheckpointError):
        modeling.load(path)
    assert not hub


def test_folder_without_weights(tmp_path):
    with pytest.raises(modeling.CheckpointError, match="holds no"):
        find(tmp_path)


def test_other_files(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(modeling.CheckpointError, match=r"neither a \.gguf nor a \.safetensors"):
        find(tmp_path / "model.bin")


def test_folder_without_config(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(modeling.CheckpointError, match=r"config\.json does not exist"):
        find(tmp_path)


def test_a_safetensors_file_by_name(tmp_path):
    shutil.copytree(FIXTURES / "flint-fused-bf16", tmp_path, dirs_exist_ok=True)
    assert modeling.load(tmp_path / "model.safetensors", progress=False).weight_format == "bf16"
