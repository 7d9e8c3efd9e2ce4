"""The example configurations: as they are, and with what is commented out."""

import re
from pathlib import Path

import pytest

from serve.grpc.config import check, parse, read_yaml

FILES = sorted((Path(__file__).parents[3] / "configs" / "serve").glob("*.yaml"))


def test_each_model_has_one():
    assert {"flint.yaml", "inkling.yaml"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_accepted(path):
    config = parse(["--config", str(path)])
    assert config.model is not None and config.config == str(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_so_is_what_is_commented_out(path, tmp_path):
    text, shown = re.subn(r"^# (?=[a-z_]+: \S+( |$))", "", path.read_text(), flags=re.M)
    (everything := tmp_path / path.name).write_text(text)
    check(read_yaml(everything))
    if path.name in ("flint.yaml", "inkling.yaml"):
        assert shown >= 7
