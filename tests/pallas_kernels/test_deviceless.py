"""Compiling without a GPU: what is counted, on functions whose launches are known."""

import functools
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as plt

from pallas_kernels import deviceless
from pallas_kernels.thunks import launches, parse

ROOT = Path(__file__).parents[2]
X = jax.ShapeDtypeStruct((256,), jnp.float32)


def kernel(name, num_warps=4):
    """Makes a function of arrays of a Pallas-Triton kernel's body; its result is like the first of them."""

    def wrap(body):
        def call(*arrays):
            shape, params = jax.typeof(arrays[0]), plt.CompilerParams(num_warps=num_warps)
            return pl.pallas_call(body, shape, compiler_params=params, name=name)(*arrays)

        return call

    return wrap


@kernel("double")
def double(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


@kernel("increment")
def increment(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1


@kernel("add_rows")
def add_rows(x_ref, w_ref, o_ref):
    o_ref[...] = x_ref[...] + jnp.sum(w_ref[...], axis=0)


def chain(x):
    """Six launches of two kernels, none of which XLA can fuse with another."""
    for _ in range(3):
        x = increment(double(x))
    return x


@pytest.mark.parametrize("target, architecture", [("h200", "sm_90a"), ("gb200", "sm_100a")])
def test_kernels_in_a_row_are_one_command_buffer(target, architecture, compiled):
    report = compiled(target, chain, X)
    assert report.kernels == 6
    assert report.kinds == {"pallas_triton": 6}
    assert report.names == {"double": 3, "increment": 3}
    assert (report.copies, report.command_buffers, report.spills, report.local_memory) == (0, 1, 0, 0)
    assert not report.uncaptured
    assert not report.loops
    assert set(report.code) == {"double", "increment"}
    for name, code in report.code.items():
        assert f".target {architecture}\n" in code.ptx
        assert f".entry {name}(" in code.ptx
        assert 0 < code.registers <= report.registers_max <= 255


def test_fusions_and_library_calls_are_kernels(compiled):
    w = jax.ShapeDtypeStruct((256, 256), jnp.complex64)
    report = compiled("h200", lambda x, w: (jnp.sin(double(x)), w @ w @ w), X, w)
    assert set(report.kinds) == {"pallas_triton", "fusion", "cublas"}
    assert (report.kinds["pallas_triton"], report.kinds["cublas"]) == (1, 2)
    assert report.kernels == report.kinds.total()
    assert report.local_memory == 0  # an XLA_FLAGS that turns optimisation off, as in these tests, is for the CPU


def test_kernels_of_one_name_are_told_apart(compiled):
    @kernel("same")
    def triple(x_ref, o_ref):
        o_ref[...] = 3 * x_ref[...]

    report = compiled("h200", lambda x: triple(kernel("same")(lambda x_ref, o_ref: None)(x)), X)
    assert report.names == {"same": 1, "same__1": 1}
    assert report.code["same"].ptx != report.code["same__1"].ptx


def test_few_kernels_are_not_worth_a_command_buffer(compiled):
    report = compiled("h200", lambda x: increment(double(x)), X)
    assert report.command_buffers == 0
    assert report.uncaptured == {"pallas_triton": 2}


def test_slices_of_stacked_weights_are_copies(compiled):
    def stacked(x, w):
        for layer in range(5):
            x = add_rows(x, w[layer])
        return x

    def separate(x, *w):
        for layer in w:
            x = add_rows(x, layer)
        return x

    report = compiled("h200", stacked, X, jax.ShapeDtypeStruct((5, 16, 256), jnp.float32))
    assert (report.kernels, report.copies) == (5, 5)
    report = compiled("h200", separate, X, *[jax.ShapeDtypeStruct((16, 256), jnp.float32)] * 5)
    assert (report.kernels, report.copies) == (5, 0)


@pytest.mark.parametrize("donate, copies", [((), 1), (0, 0)])
def test_updating_what_is_not_donated_is_a_copy(donate, copies, compiled):
    cache, row = jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((1, 256), jnp.float32)
    place = jax.ShapeDtypeStruct((), jnp.int32)
    report = compiled("h200", lambda c, r, i: lax.dynamic_update_slice(c, r, (i, 0)), cache, row, place, donate=donate)
    assert (report.kernels, report.copies) == (1, copies)


def test_what_cannot_be_captured_is_named(compiled):
    report = compiled("h200", lambda x: chain(jnp.fft.fft(chain(x)).real), X)
    assert report.uncaptured == {"kFft": 1}
    assert report.command_buffers == 2
    assert report.kinds["pallas_triton"] == 12


def test_a_loop_of_known_length_needs_no_host(compiled):
    report = compiled("h200", lambda x: double(lax.fori_loop(0, 7, lambda _, x: chain(x), x)), X)
    assert [loop.trips for loop in report.loops] == [7]
    assert report.kinds["pallas_triton"] == 7 * 6 + 1
    assert report.command_buffers == 7
    assert report.uncaptured["pallas_triton"] == 1  # the one after the loop
    assert not set(report.uncaptured) - {"pallas_triton", "copy"}
    step = report.body()
    assert step.kinds == {"pallas_triton": 6, "fusion": 1}  # the loop's counter
    assert (step.copies, step.command_buffers) == (0, 1)
    assert not step.uncaptured


def test_a_loop_within_a_step_counts_as_often_as_it_runs(compiled):
    def step(_, x):
        return lax.fori_loop(0, 3, lambda _, x: chain(x), double(x))

    report = compiled("h200", lambda x: lax.fori_loop(0, 7, step, x), X)
    assert [loop.trips for loop in report.loops] == [7, 3]
    assert report.kinds["pallas_triton"] == 7 * (1 + 3 * 6)
    assert report.body().kinds["pallas_triton"] == 1 + 3 * 6


def test_a_loop_that_the_host_must_ask_about_is_uncaptured(compiled):
    report = compiled("h200", lambda x: lax.while_loop(lambda x: x[0] < 100, chain, x), X)
    assert [loop.trips for loop in report.loops] == [None]
    assert report.uncaptured["kWhile"] == 1
    assert report.uncaptured["fusion"] == 1  # the condition
    assert report.kinds["pallas_triton"] == 6
    assert report.command_buffers == 1


def test_a_body_needs_a_loop(compiled):
    with pytest.raises(ValueError, match="0 outermost loops"):
        compiled("h200", chain, X).body()


def test_of_a_conditional_the_longest_branch_counts(compiled):
    report = compiled("h200", lambda p, x: lax.cond(p, chain, double, x), jax.ShapeDtypeStruct((), jnp.bool), X)
    assert report.kinds == {"pallas_triton": 6}


def test_spills_are_seen(compiled):
    def center(x_ref, o_ref):
        x = x_ref[...]  # 256 values a thread of one warp, needed again after the sum
        o_ref[...] = x - jnp.sum(x)

    x = jax.ShapeDtypeStruct((8192,), jnp.float32)
    report = compiled("h200", kernel("center", num_warps=1)(center), x)
    code = report.code["center"]
    assert code.registers == report.registers_max == 255
    assert code.spill_stores > 0
    assert code.spill_loads > 0
    assert report.spills == code.spill_stores + code.spill_loads
    assert report.local_memory == code.local >= code.spill_stores
    report = compiled("h200", kernel("center", num_warps=4)(center), x)
    assert report.spills == report.local_memory == 0
    assert 64 < report.registers_max < 128


def test_mosaic_kernels_are_read_once_a_process(compiled):
    @functools.partial(plgpu.kernel, out_type=X)
    def shift(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 3

    def step(x):
        return shift(chain(shift(x)))

    report = compiled("h200", step, X)
    assert report.kinds == {"mosaic_gpu": 2, "pallas_triton": 6}
    assert report.command_buffers == 1
    assert sorted(name[:5] for name in report.code) == ["doubl", "incre", "shift", "shift"]
    assert report.spills == 0
    again = compiled("h200", step, X)
    assert again.kinds == report.kinds
    with pytest.raises(RuntimeError, match="2 Mosaic GPU kernels were compiled before in this process"):
        _ = again.spills


def test_layouts_are_in_the_ttgir(compiled):
    report = compiled("h200", double, X, ttgir=True)
    assert list(report.ttgir) == ["double"]
    assert re.search(
        r"#ttg.blocked<\{sizePerThread = \[2\], threadsPerWarp = \[32\], warpsPerCTA = \[4\]", report.ttgir["double"]
    )
    assert "tt.load" in report.ttgir["double"]
    assert not compiled("h200", double, X).ttgir


SEQUENCE = """\
001: kMemzero [source       | next=002 (1)] kMemzero
002: kWhile   [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    000: kCommandBuffer [source | sink]
        004: kAsyncStart   [source       | next=009 (2)] stream=computation_stream[0], async_id=4
            006: kDynamicSliceFusion [source | sink] params=1, results=1
                005: kCopy [source | sink] kCopy
        007: kAsyncDone    [source       | sink        ] async_id=4
        008: kWhile        [source       | sink        ]
    condition:
            009: kCustomKernel [source | sink] compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
          body:
            010: kCustomKernel [source | sink] gemv grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
    011: kConditional [source | sink]
      branch_0:
        012: kCustomKernel [source | sink] gemv grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
      branch_1:
        013: kCopy         [source | sink] kCopy
        014: kCustomKernel [source | sink] gemv grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
"""
METADATA = "".join(
    f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}\n}}\n'
    for number, name in [(2, "while.1"), (8, "while.2"), (10, "call.1"), (12, "fusion.1")]
)
HLO = """\
  %while.1 = (s32[], f32[8]{0}) while(%tuple), condition=%c, body=%b, backend_config={"known_trip_count":{"n":"5"}}
  %while.2 = (s32[], f32[8]{0}) while(%tuple), condition=%c, body=%b
  %call.1 = f32[8]{0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %fusion.1 = f32[8]{0} fusion(%a), kind=kLoop, calls=%f
"""


def test_a_thunk_sequence_is_a_tree():
    runs = list(launches(parse(SEQUENCE, METADATA, HLO)))
    assert [(run.thunk.what(), run.times, run.captured) for run in runs] == [
        ("memset", 1, False),
        ("kWhile", 1, False),
        ("kCommandBuffer", 5, False),
        ("kAsyncStart", 5, True),
        ("kDynamicSliceFusion", 5, True),
        ("copy", 5, True),
        ("kWhile", 5, True),
        ("kCustomKernel", 5, True),
        ("pallas_triton", 5, True),
        ("kConditional", 5, False),
        ("copy", 5, False),
        ("kCustomKernel", 5, False),
    ]


def test_a_line_of_another_form_is_refused():
    with pytest.raises(ValueError, match="not a line of a thunk sequence: 'surprise'"):
        parse(SEQUENCE + "surprise\n", METADATA, HLO)


def test_a_missing_assembler_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(deviceless, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"ptxas is missing. .*make setup.*requirements/compile.txt"):
        deviceless._ptxas.__wrapped__()


alone = pytest.mark.skipif(bool(find_spec("jax_plugins")), reason="JAX finds a plugin in this environment by itself")


@alone
def test_a_missing_plugin_says_what_to_install():
    done = run(
        """
import sys
from pallas_kernels import deviceless
sys.prefix = "/nowhere"
deviceless._device("h200")
"""
    )
    assert "RuntimeError: JAX's CUDA plugin is missing. On Linux `make setup` installs it" in done.stderr


@alone
def test_jax_starts_as_if_the_plugin_were_not_there():
    done = run("import jax; print(jax.devices())")
    assert done.stdout.startswith("[CpuDevice(id=0)")
    assert not done.stderr


def test_the_locked_plugin_is_of_the_locked_jax():
    pins = [dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements" / name).read_text(), re.M)) for name in LOCKS]
    assert pins[0]["jax"] == pins[1]["jax-cuda13-plugin"] == pins[1]["jax-cuda13-pjrt"]


LOCKS = ("test.txt", "compile.txt")


def run(code):
    """Runs Python as a user would, who sets no variables."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
