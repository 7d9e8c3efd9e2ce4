"""The README's examples run as written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from modeling.score import read_media, read_tokens
from serve.grpc.config import check, read_yaml

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_notebook_example_runs_and_is_right():
    code = next(block for block in BLOCKS if "modeling.load" in block)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("-> Oslo")


def test_media_example_runs_and_is_right(tmp_path):
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    code = "\n".join(block for block in BLOCKS if "inkling" in block and "openai" not in block)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("-> A blue cross and the note F sharp.")
    accepted, drafted = map(int, re.findall(r"(\d+) of (\d+) drafts", done.stdout)[0])
    assert 0 < accepted <= drafted
    # What the last block writes is what `modeling.score --media` takes: a placeholder for each row.
    tokens, media = read_tokens(tmp_path / "ids.npy"), read_media(tmp_path / "media.npz")
    config = json.loads((ROOT / "checkpoints" / "inkling-tiny" / "config.json").read_text())
    assert (tokens == config["image_token_id"]).sum() == len(media["pixel_values"]) > 0
    assert (tokens == config["audio_token_id"]).sum() == len(media["audio_input_ids"][0]) > 0


def test_run_files_hold_options_of_the_server_and_name_what_is_here():
    paths = sorted((ROOT / "configs" / "serve").glob("*.yaml"))
    assert {"flint-tiny.yaml", "inkling-tiny.yaml"} <= {path.name for path in paths}
    for path in paths:
        config = read_yaml(path)
        check(config)
        assert config.model is not None
        assert (ROOT / config.model).is_dir() or not config.model.startswith("checkpoints/")


def test_examples_are_short():
    assert BLOCKS
    assert all(len([line for line in block.splitlines() if line.strip()]) <= 12 for block in BLOCKS)


def test_files_and_folders_that_are_linked_exist():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("http")]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_modules_that_are_named_exist():
    for module in set(re.findall(r"python -m ([\w.]+)", README)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
