"""The house rules that a machine can check: arrows, weights of imports, --help without an accelerator."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("modeling", "pallas_kernels", "sharding", "serve", "benchmarks")


def imports(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize(
    "package, forbidden",
    [
        ("pallas_kernels", {"modeling", "serve", "sharding", "benchmarks"}),
        ("sharding", {"serve", "benchmarks"}),
        ("modeling", {"serve", "benchmarks"}),
        ("serve", {"benchmarks"}),
        # `benchmarks` stands on top and may measure the engine too; that it imports light is tested below.
    ],
)
def test_arrows_go_one_way(package, forbidden):
    wrong = {str(f.relative_to(ROOT)): imports(f) & forbidden for f in files(package)}
    assert not {name: found for name, found in wrong.items() if found}


def test_files_stay_short():
    long = {
        str(f.relative_to(ROOT)): n for p in PACKAGES for f in files(p) if (n := len(f.read_text().split("\n"))) > 500
    }
    assert not long


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def test_the_bottom_imports_with_jax_flax_numpy_and_ml_dtypes_alone():
    heavy = (
        "tqdm tokenizers sentencepiece jinja2 gguf grpc google smg_grpc_proto pydantic yaml tyro safetensors".split()
    )
    done = run(
        f"""
import importlib, pkgutil, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {heavy!r}:
            raise ModuleNotFoundError(name)
# flax itself imports some of these; what it has loaded may stay.
import jax, flax.nnx
sys.meta_path.insert(0, Absent())
for package in ('modeling', 'pallas_kernels', 'sharding', 'benchmarks'):
    root = importlib.import_module(package)
    for found in pkgutil.walk_packages(root.__path__, package + '.'):
        importlib.import_module(found.name)
print('ok')
"""
    )
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize("module", ["modeling.score", "modeling.convert", "serve.generate", "serve.grpc.__main__"])
def test_jx09_help_imports_no_jax(module):
    done = run(
        f"""
import sys
from {module} import main
try:
    main(['--help'])
except SystemExit as stop:
    assert not stop.code
assert 'jax' not in sys.modules, 'jax was imported'
print('ok')
"""
    )
    assert done.stdout.endswith("ok\n"), done.stderr


def test_jx09_importing_everything_touches_no_backend():
    done = run(
        """
import importlib, pkgutil
for package in ('modeling', 'pallas_kernels', 'sharding', 'serve', 'benchmarks'):
    root = importlib.import_module(package)
    for found in pkgutil.walk_packages(root.__path__, package + '.'):
        if not found.name.endswith('__main__'):
            importlib.import_module(found.name)
from jax._src import xla_bridge
assert not xla_bridge._backends, xla_bridge._backends
print('ok')
""",
        JAX_PLATFORMS="a_platform_that_does_not_exist",
    )
    assert done.stdout == "ok\n", done.stderr
