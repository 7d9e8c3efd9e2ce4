"""`python -m benchmarks.compiled` compiles the steps that are timed, and counts one of them."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import SingleDeviceSharding
from small import SMALL

from benchmarks import compiled, decode
from benchmarks.full_size import MODELS
from modeling.flint.config import FULL, SLIDING, FlintConfig
from pallas_kernels import deviceless

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="JAX's CUDA plugin exists for Linux alone")

FULL_SIZE = FlintConfig(num_hidden_layers=2, layer_types=(FULL, SLIDING), sparse_layers=(False, True))


def line(capsys, *args: str) -> dict:
    assert compiled.main([*args]) == 0
    out = capsys.readouterr()
    assert "registers" in out.err
    return json.loads(out.out)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(MODELS, "flint", SMALL)
    monkeypatch.setitem(MODELS, "full size", FULL_SIZE)


def test_decode_counts_one_step(monkeypatch, capsys):
    arguments = ["--format", "nvfp4", "--context", "100", "--batch", "2", "--layers", "1", "--path", "plain"]
    found = line(capsys, *arguments)
    assert (found["model"], found["phase"], found["batch"], found["layers"]) == ("flint", "decode", 2, 1)
    assert found["path"] == "plain"
    assert 0 < found["kernels"] == sum(found["kinds"].values()) - found["copies"]
    assert found["command_buffers"] > 0
    assert found["uncaptured"] == sum(found["uncaptured_kinds"].values())
    assert found["spills"] == 0
    assert 0 < found["registers_max"] <= 255
    # One step is counted, however many a launch has.
    monkeypatch.setattr(compiled, "STEPS", 5)
    assert line(capsys, *arguments) | {"seconds": 0} == found | {"seconds": 0}


def test_a_fused_step_is_one_command_buffer(capsys):
    """At the published sizes, a dense and a sparse layer: nothing is copied, spilled, or left to the host."""
    found = line(capsys, "--model", "full size", "--format", "nvfp4", "--context", "102400")
    assert (found["path"], found["layers"]) == ("pallas", 2)
    assert (found["command_buffers"], found["copies"], found["uncaptured"]) == (1, 0, 0)
    assert (found["spills"], found["local_memory"]) == (0, 0)
    assert found["kinds"]["pallas_triton"] <= 2 * 7 + 1
    # Around the layers XLA has the embedding, RoPE's angles, the final norm, the choice of a token, and the loop.
    assert found["kernels"] - found["kinds"]["pallas_triton"] <= 10


def test_kernels_are_counted_as_on_a_gpu(capsys, tmp_path):
    """What `benchmarks.decode` reads of a program on its own device is what is counted here."""
    device = deviceless._device("h200")
    options = {"xla_dump_to": str(tmp_path), "xla_gpu_cuda_data_dir": str(deviceless._ptxas().parents[1])}

    def launch(x):
        return lax.fori_loop(0, 5, lambda _, x: jnp.sin(jnp.sort(x)), x)

    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    there = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
    jax.jit(launch).lower(there).compile(compiler_options=options)
    report = deviceless.compile_for("h200", launch, x).body()
    assert decode.kernels_a_turn(tmp_path, "jit_launch") == report.kernels > 1
    assert decode.kernels_a_turn(tmp_path, "jit_other") is None
    assert "not counted" in capsys.readouterr().err


def test_prefill_counts_one_chunk(capsys):
    arguments = ["--format", "bf16", "--phase", "prefill", "--context", "128", "--chunk", "64", "--layers", "1"]
    found = line(capsys, *arguments)
    assert (found["phase"], found["layers"]) == ("prefill", 1)
    assert 0 < found["kernels"] == sum(found["kinds"].values()) - found["copies"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--drafts", "1"],
        ["--path", "pallas", "--batch", "9"],
        ["--phase", "prefill", "--batch", "2"],
        ["--target", "a100"],
        ["--layers", "x"],
    ],
)
def test_what_cannot_be_compiled_is_refused(arguments):
    with pytest.raises(SystemExit):
        compiled.main(arguments)
