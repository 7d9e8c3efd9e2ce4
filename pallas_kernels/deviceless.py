"""Compiles for a GPU on a machine without one, down to machine code, and reports what would run there.

    report = compile_for("h200", fn, *avals)
    assert report.kernels == 2 and report.copies == 0 and not report.uncaptured and report.spills == 0

JAX's CUDA plugin compiles for a device that it only knows the description of. What a GPU would tune by trying (tiles of
matrix products, cuBLAS algorithms) stays at XLA's defaults; Pallas kernels come out as they would on the GPU.

The plugin and NVIDIA's assembler are looked for in the environment, then in its folder `deviceless`, where `make setup`
puts them: a JAX that found the plugin beside it would try to use a GPU at every start, and complain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from pallas_kernels.thunks import Launch, Thunk, launches, parse


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU, as XLA's own descriptions of it (xla/backends/gpu/target_config/specs) have it. Sizes in bytes."""

    name: str
    capability: int
    num_cores: int
    clock_ghz: float
    memory: int
    memory_bandwidth: int
    l2_cache: int

    @property
    def architecture(self) -> str:
        """What ptxas calls it: with the instructions that later GPUs do not have."""
        return f"sm_{self.capability}a"

    def config(self) -> str:
        """XLA's GpuTargetConfigProto. Without the versions, XLA keeps traced calls out of command buffers."""
        return f"""
            platform_name: "CUDA" device_description_str: "{self.name}" runtime_version {{ major: 13 }}
            gpu_device_info {{
              name: "{self.name}" core_count: {self.num_cores} clock_rate_ghz: {self.clock_ghz}
              cuda_compute_capability {{
                major: {self.capability // 10} minor: {self.capability % 10} feature_extension: ACCELERATED_FEATURES
              }}
              device_memory_size: {self.memory} memory_bandwidth: {self.memory_bandwidth} l2_cache_size: {self.l2_cache}
              device_interconnect_info {{ active_links: 18 }}
              threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048 fpus_per_core: 128
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              driver_version: "13.0.0" kernel_mode_driver_version: "580.0.0" runtime_version: "13.0.0"
              compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
            }}"""


TARGETS = {
    "h200": Target("NVIDIA H200", 90, 132, 1.98, 151_397_597_184, 4_800_000_000_000, 52_428_800),
    "gb200": Target("NVIDIA GB200", 100, 152, 2.062, 197_897_748_480, 7_928_064_000_000, 135_528_448),
}


@dataclasses.dataclass(frozen=True)
class Code:
    """One kernel's PTX, and what its machine code takes of a thread.

    Attributes:
        registers: of 32 bits.
        spill_stores, spill_loads: bytes moved to and from local memory for want of registers.
        local: bytes of local memory.
    """

    ptx: str
    registers: int
    spill_stores: int
    spill_loads: int
    local: int

    @property
    def spills(self) -> int:
        """Bytes spilled, both ways."""
        return self.spill_stores + self.spill_loads


@dataclasses.dataclass(frozen=True)
class Report:
    """What one run of a compiled function launches, and the code of its kernels.

    A loop inside counts as often as it runs (once, if only the GPU knows); of a conditional counts the longest branch.

    Attributes:
        thunks: the program.
        code: by name as in the PTX, everything but what comes from NVIDIA's libraries.
        unread: how many kernels are not in `code` though they should be: Mosaic GPU compiles each once a process.
        ttgir: with `ttgir=True`, each Triton kernel's last form before LLVM, where layouts are final.
        seconds: what compiling took.
    """

    thunks: list[Thunk]
    code: dict[str, Code]
    unread: int
    ttgir: dict[str, str]
    seconds: float

    @property
    def kernels(self) -> int:
        """Kernel nodes: fusions, custom kernels, calls of libraries; neither copies nor memsets."""
        return sum(n for kind, n in self.kinds.items() if kind not in ("copy", "memset"))

    @property
    def copies(self) -> int:
        """Copies from device memory to device memory."""
        return self.kinds["copy"]

    @property
    def kinds(self) -> Counter[str]:
        """Launches by kind: "fusion", "pallas_triton", "mosaic_gpu", "cublas", "copy", "memset", or what XLA says."""
        return _count(run for run in self._runs if not run.thunk.parts)

    @property
    def names(self) -> Counter[str]:
        """Launches of the kernels in `code`, by name."""
        names: Counter[str] = Counter()
        for run in self._runs:
            names[run.thunk.name] += run.times
        return Counter({name: names[name] for name in self.code if names[name]})

    @property
    def command_buffers(self) -> int:
        """Launches of CUDA graphs."""
        return _count(self._runs)["kCommandBuffer"]

    @property
    def uncaptured(self) -> Counter[str]:
        """What no command buffer holds, by kind.

        Loops and conditionals are counted if the host has to wait for the GPU to say how they go on.
        """
        waits = ("kWhile", "kConditional")
        return _count(
            run
            for run in self._runs
            if not run.captured and ((run.thunk.kind in waits and run.thunk.trips is None) or not run.thunk.parts)
        )

    @property
    def loops(self) -> list[Thunk]:
        """Every loop; `trips` says how often it runs, if XLA knows."""
        return [run.thunk for run in self._runs if run.thunk.kind == "kWhile"]

    @property
    def spills(self) -> int:
        """Bytes a thread that kernels write to and read from local memory for want of registers."""
        return sum(code.spills for code in self._all_code())

    @property
    def local_memory(self) -> int:
        """Bytes of local memory a thread, all kernels together: spills, and arrays that registers cannot index."""
        return sum(code.local for code in self._all_code())

    @property
    def registers_max(self) -> int:
        """Registers a thread of the kernel that uses most."""
        return max((code.registers for code in self._all_code()), default=0)

    def body(self) -> Report:
        """The same for one turn of the function's only outermost loop, without what precedes and follows it."""
        loops = [thunk for thunk in self.thunks if thunk.kind == "kWhile"]
        if len(loops) != 1:
            raise ValueError(f"{len(loops)} outermost loops, where one was expected")
        return dataclasses.replace(self, thunks=loops[0].parts["body"])

    def _all_code(self) -> Collection[Code]:
        if self.unread:
            raise RuntimeError(f"{self.unread} Mosaic GPU kernels were compiled before in this process; use a new one")
        return self.code.values()

    @property
    def _runs(self) -> Iterator[Launch]:
        return launches(self.thunks)


def compile_for(
    target: str, fn: Callable, *avals: Any, donate: int | Sequence[int] = (), ttgir: bool = False
) -> Report:
    """Compiles `fn` for "h200" or "gb200" (the `TARGETS`).

    Args:
        avals: its arguments, or pytrees of them; of arrays only shapes and dtypes matter.
        donate: positions of arguments whose memory the results may take.
        ttgir: also keep the Triton kernels' TTGIR, which takes over a second a kernel.

    Raises:
        RuntimeError: JAX's CUDA plugin or ptxas is missing, or a dump is not as expected.
    """
    gpu, ptxas, device = TARGETS[target], _ptxas(), _device(target)
    args = jax.tree.map(
        lambda aval: jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=SingleDeviceSharding(device)), avals
    )
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(gpu.name, gpu.num_cores, "gpu"))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, _mosaic_dumps_to(name, ptxas), jax.sharding.use_abstract_mesh(mesh):
        jax.jit(fn, donate_argnums=donate).lower(*args).compile(
            compiler_options={
                "xla_dump_to": name,
                "xla_dump_emitter_re": "ptx|triton-to-llvm" if ttgir else "ptx",
                "xla_gpu_cuda_data_dir": str(ptxas.parents[1]),
                "xla_backend_optimization_level": 3,  # XLA's default, whatever XLA_FLAGS says
            }
        )
        seconds, folder = time.perf_counter() - started, Path(name)
        hlo = _only(folder, "*_after_optimizations.txt")
        made = list(folder.glob("*.thunk_sequence_after_thunk_passes.txt"))  # absent where passes changed nothing
        sequence = _only(folder, made[0].name if made else "*.thunk_sequence.txt")
        code = _code(folder, ptxas, gpu)
        mosaic = set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', hlo))
        unread = len(mosaic) - sum(_MOSAIC in name for name in code)
        thunks = parse(sequence, _only(folder, "*.thunk_metadata.txt"), hlo)
        return Report(thunks, code, unread, _ttgir(folder), seconds)


def _only(folder: Path, pattern: str) -> str:
    """The text of the one dump of that name."""
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise RuntimeError(f"XLA dumped {len(found)} files {pattern} where one was expected")
    return found[0].read_text()


def _count(runs: Iterable[Launch]) -> Counter[str]:
    counter: Counter[str] = Counter()
    for run in runs:
        counter[run.thunk.what()] += run.times
    return counter


def _code(folder: Path, ptxas: Path, gpu: Target) -> dict[str, Code]:
    """What ptxas says of every kernel dumped."""

    def assemble(path: Path) -> list[tuple[str, Code]]:
        command = [ptxas, "-v", f"-arch={gpu.architecture}", path, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas: {done.stderr.strip()}")
        ptx = path.read_text()
        return [
            # Mosaic kernels of one name differ by their file's name alone.
            (path.stem + _MOSAIC if _MOSAIC in name else name, Code(ptx, *map(int, (registers, stores, loads, local))))
            for name, local, stores, loads, registers in _ASSEMBLED.findall(done.stderr)
        ]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(itertools.chain.from_iterable(pool.map(assemble, sorted(folder.glob("*.ptx")))))


_MOSAIC = "_mosaic_gpu_kernel"  # how the names of its kernels end
_ASSEMBLED = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


def _ttgir(folder: Path) -> dict[str, str]:
    """By kernel, the dump before the pass that leaves TTGIR."""
    found = {}
    for path in folder.glob("*.triton-to-llvm.txt"):
        [form] = re.findall(
            r"IR Dump Before ConvertTritonGPUToLLVM\b[^\n]*\n(.*?)\n// -----//", path.read_text(), re.DOTALL
        )
        found[path.name.split(".")[-3]] = form
    return found


_MISSING = (
    "{what} is missing. On Linux `make setup` installs it; or install requirements/compile.txt into the folder "
    "`deviceless` of the environment, or requirements/cuda.txt into the environment itself."
)


@functools.cache
def _device(target: str) -> Any:
    """A device that programs can be compiled for, though it is not there."""
    jax.devices()  # JAX looks for plugins and settles on its devices now, before one of them is added
    describe = functools.partial(
        topologies.get_topology_desc, platform="cuda", target_config=TARGETS[target].config(), topology="1x1x1"
    )
    try:
        return describe().devices[0]
    except NotImplementedError:
        _register_plugin()
        return describe().devices[0]


def _register_plugin() -> None:
    """Does what JAX does with a plugin that it finds, but for asking NVIDIA's driver and libraries."""
    with _deviceless_importable(), _environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):
        try:
            plugin, version = importlib.import_module("jax_plugins.xla_cuda13"), metadata.version("jax-cuda13-pjrt")
        except ModuleNotFoundError as error:
            raise RuntimeError(_MISSING.format(what="JAX's CUDA plugin")) from error
        if version != jax.__version__:
            raise RuntimeError(f"jax {jax.__version__} needs jax-cuda13-pjrt of the same version, not {version}")
        plugin.initialize()


@functools.cache
def _ptxas() -> Path:
    """NVIDIA's assembler, in a folder as XLA wants to know it: bin/ptxas."""
    with _deviceless_importable():
        spec = find_spec("nvidia.cu13") if find_spec("nvidia") else None
    for folder in spec.submodule_search_locations or () if spec else ():
        if (path := Path(folder) / "bin" / "ptxas").exists():
            return path
    raise RuntimeError(_MISSING.format(what="ptxas"))


@contextlib.contextmanager
def _deviceless_importable() -> Iterator[None]:
    """Lets modules be found in the environment's folder `deviceless` too, for a moment."""
    sys.path.append(folder := str(Path(sys.prefix) / "deviceless"))
    try:
        yield
    finally:
        sys.path.remove(folder)


def _mosaic_dumps_to(folder: str, ptxas: Path) -> contextlib.AbstractContextManager[None]:
    """Has Mosaic GPU, which reads its options from the environment, dump PTX, and find what it would ask a GPU's
    environment for."""
    plugin = importlib.import_module("jax_cuda13_plugin")
    return _environment(
        MOSAIC_GPU_DUMP_PTX="1",
        MOSAIC_GPU_DUMP_TO=folder,
        MOSAIC_GPU_CUDA_ROOT=str(ptxas.parents[1]),
        MOSAIC_GPU_RUNTIME_LIB_PATH=str(Path(plugin.__path__[0]) / "libmosaic_gpu_runtime.so"),
    )


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
