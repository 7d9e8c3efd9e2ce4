"""The README's examples run as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_notebook_example_runs_and_is_right():
    code = next(block for block in BLOCKS if "modeling.load" in block)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("-> Oslo")


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
