"""Measures the decode kernels' block sizes on the GPU at hand, and writes them down: `python -m benchmarks.tune`.

For each op and each of a model's shapes, a short list of candidates is compiled, several at once. Candidates that do
not compile, spill registers or differ from the reference are left out; of the others the median of many launches
counts, each with other weights, so that none are in the L2 cache. The table (`pallas_kernels/tuned/<device>.json`) is
written after every case; cases that were not measured stay as they are. Gives exit code 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.full_size import MODELS
from benchmarks.tune_cases import Case, cases_of
from pallas_kernels.tuning import SIZES, Cases, read_table, table_path

# Block sizes change the order of float32 sums, and with it now and then a rounding to bfloat16.
MAX_ERROR = 2.0**-7
MIN_LAUNCHES = 24  # that a median is of
Sizes = dict[str, int]


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--model", choices=["flint"], default="flint")
    parser.add_argument("--op", choices=sorted(SIZES), nargs="+", default=sorted(SIZES), help="default: all of them")
    parser.add_argument("--tokens", type=int, choices=range(1, 9), nargs="+", default=[1, 8], help="of a step")
    parser.add_argument("--format", choices=["nvfp4", "bf16"], nargs="+", default=["nvfp4", "bf16"])
    parser.add_argument("--out", type=Path, help="default: the device's table in pallas_kernels/tuned")
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu":
        parser.error(f"block sizes are measured on a GPU, and this is a {jax.default_backend()}")
    device = jax.devices()[0].device_kind
    cases = cases_of(MODELS[args.model], args.op, args.format, args.tokens)
    return tune(cases, args.out or table_path(device), device)


def tune(cases: list[Case], out: Path, device: str, **how: Any) -> int:
    """Measures all cases; gives the exit code, 1 if some case has no candidate that works.

    Args:
        out: the table, written after every case.
        how: further arguments of the ops, such as interpret=True.
    """
    best: list[tuple[Case, Sizes, float]] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # XLA compiles outside of Python's lock
        compiling = [
            (
                pool.submit(compiled, case, None, 1),
                [(sizes, pool.submit(compiled, case, sizes, case.num_launches, **how)) for sizes in case.candidates],
            )
            for case in cases
        ]
        for number, (case, (reference, candidates)) in enumerate(zip(cases, compiling, strict=True), 1):
            log(f"[{number}/{len(cases)}] {case.op}, {case.name}")
            measured = list(measure(case, reference, candidates))
            if measured:
                us, sizes = min(measured, key=lambda found: found[0])
                best.append((case, sizes, us))
                write_table(out, device, {case.op: {case.name: {**sizes, "us": round(us, 2)}}})
            else:
                log("  no candidate works")
    print(f"{'op':18} {'case':48} {'us':>8} {'TB/s':>5}  sizes")
    for case, sizes, us in best:
        print(f"{case.op:18} {case.name:48} {us:8.2f} {case.rate(us):5.2f}  {described(sizes)}")
    return 0 if len(best) == len(cases) else 1


def measure(case: Case, reference: Future, candidates: list[tuple[Sizes, Future]]) -> Iterator[tuple[float, Sizes]]:
    """Median microseconds of each candidate that compiles and is right. Futures give what `compiled` returns."""
    arguments = Arguments.of(case)
    [want] = arguments.pass_to(reference.result(), 1)
    repeats = math.ceil(MIN_LAUNCHES / case.num_launches)
    for sizes, future in candidates:
        if failure := future.exception():
            log(f"  {described(sizes)}: does not compile: {first_line(failure)}")
            continue
        run = functools.partial(arguments.pass_to, future.result(), case.num_launches)
        try:
            error = difference(case.compared(run()[0]), case.compared(want))
            if error <= MAX_ERROR:
                us = statistics.median(kernel_times(lambda run=run: [run() for _ in range(repeats)], case.kernel))
                log(f"  {described(sizes)}: {us:.2f} us, {case.rate(us):.2f} TB/s")
                yield us, sizes
            else:
                log(f"  {described(sizes)}: wrong, off by {error:.1e}")
                arguments = Arguments.of(case)  # the state may be wrong too
        except jax.errors.JaxRuntimeError as failure:
            log(f"  {described(sizes)}: does not run: {first_line(failure)}")
            arguments = Arguments.of(case)  # the state may be gone


@dataclasses.dataclass
class Arguments:
    """A case's arguments; what a run returns of the state goes to the next."""

    state: Any
    fixed: Any
    own: list

    @classmethod
    def of(cls, case: Case) -> Arguments:
        return cls(*case.make(case.num_launches))

    def pass_to(self, run: Callable, num_launches: int) -> list:
        """The outputs of a function that `compiled` returned."""
        outputs, self.state = run(self.state, self.fixed, self.own[:num_launches])
        return jax.block_until_ready(outputs)


def compiled(case: Case, sizes: Sizes | None, num_launches: int, **how: Any) -> Callable:
    """A function (state, fixed, own) -> (outputs, state) of the first `num_launches` launches; of the reference where
    `sizes` is None."""
    # Jitted on its own it is traced once.
    launch = jax.jit(case.launch(implementation="reference") if sizes is None else case.launch(sizes=sizes, **how))

    def launches(state: Any, fixed: Any, own: list) -> tuple[list, Any]:
        results = []
        for arguments in own:
            outputs, state = launch(state, fixed, arguments)
            results.append(outputs)
        return results, state

    state, fixed, own = jax.eval_shape(lambda: case.make(case.num_launches))
    options = {} if sizes is None else {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    lowered = jax.jit(launches, donate_argnums=0).lower(state, fixed, own[:num_launches])
    return lowered.compile(compiler_options=options)


def difference(found: Any, wanted: Any) -> float:
    """The largest relative error of the leaves, in the 2-norm; NaN if either has one."""
    errors = []
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(leaf, np.float64), np.asarray(other, np.float64)
        errors.append(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))
    return float(np.max(errors))


def kernel_times(run: Callable[[], Any], kernel: str) -> list[float]:
    """Microseconds of each launch of a kernel while `run` runs, as the GPU's profiler sees them."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        profiles = [jax.profiler.ProfileData.from_file(str(path)) for path in Path(folder).rglob("*.xplane.pb")]
    planes = [plane for profile in profiles for plane in profile.planes if "GPU" in plane.name]
    events = [event for plane in planes for line in plane.lines for event in line.events]
    times = [event.duration_ns / 1e3 for event in events if event.name.startswith(kernel)]
    if not times:
        seen = ", ".join(sorted({event.name for event in events})) or "nothing"
        raise RuntimeError(f"the profiler saw no kernel {kernel}, but {seen}")
    return times


def write_table(path: Path, device: str, found: Cases) -> None:
    """Adds cases to a device's table, or makes one. Date and version are those of the newest cases.

    Raises:
        ValueError: the table is another device's, or malformed.
    """
    cases: Cases = {}
    if path.exists():
        table = read_table(path)
        if table["device"] != device:
            raise ValueError(f"{path} is of {table['device']}, and this is {device}")
        cases = table["cases"]
    for op, entries in found.items():
        cases[op] = cases.get(op, {}) | entries
    table = dict(device=device, date=datetime.date.today().isoformat(), jax=jax.__version__, cases=cases)
    text = json.dumps(table, indent=2, sort_keys=True)
    one_a_line = re.sub(r"\{([^{}]+)\}", lambda entry: "{" + " ".join(entry[1].split()) + "}", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(one_a_line + "\n")


def described(sizes: Sizes) -> str:
    """Sizes in words."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def first_line(error: BaseException) -> str:
    """What an error says, in short."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def log(line: str) -> None:
    """Progress, apart from the results."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
