"""The picture of decode times in docs: `python -m benchmarks.picture docs/decode-h200.jsonl docs/decode.svg`.

Draws lines that `python -m benchmarks.decode` printed, of the full Flint on one device: left one sequence against its
context, right one to eight sequences of 8,192 tokens; a line of a third kind is an error, as is anything that cannot be
read. The same lines give the same SVG to the byte. Needs matplotlib (the extra `plot`), and no JAX.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modeling.flint.config import FlintConfig

if TYPE_CHECKING:  # `benchmarks` imports without matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LAYERS = FlintConfig().num_hidden_layers
CONTEXTS, BATCHES = (1024, 4096, 16384, 65536, 262144), (1, 2, 4, 8)  # the ticks; the first and the last bound the data
CONTEXT_OF_BATCHES = 8192
KEYS = "model format context batch sample layers path ms_per_step floor_ms device jax".split()

WIDTH, HEIGHT = 860, 400
COLORS = {"nvfp4": "#0b62c4", "bf16": "#c2500a"}
LOOKS: dict[str, dict[str, Any]] = {
    "pallas": dict(marker="o", markersize=4.5, linewidth=1.8),
    "plain": dict(marker="o", markersize=3.5, linewidth=1.2, alpha=0.4),
    "floor": dict(linestyle=(0, (4, 3)), linewidth=1.2),
}
NAMES = {"pallas": "fused kernels", "plain": "plain XLA", "floor": "floor"}
NOTE = (
    "Floor: the bytes that a step must read, at the rate measured for a plain sum over memory. "
    "Points are medians, bars the fastest and slowest launch."
)
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "firesteel",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, which lays out by it; a viewer may take another
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "errorbar.capsize": 2,
}


class Point(NamedTuple):
    """One measured step.

    Attributes:
        format: of the weights, "nvfp4" or "bf16".
        path: "pallas" for the fused kernels, "plain" for plain XLA.
        context: tokens in the cache of each sequence.
        batch: sequences that decode together.
        ms: milliseconds a step, the median of all launches.
        ms_min: the fastest launch's; `ms` where the line does not say.
        ms_max: the slowest launch's, likewise.
        floor_ms: milliseconds to read what the step must read.
    """

    format: str
    path: str
    context: int
    batch: int
    ms: float
    ms_min: float
    ms_max: float
    floor_ms: float


class Measurements(NamedTuple):
    """What one file holds.

    Attributes:
        points: in the order of the file.
        machine: the device's name and the version of JAX, the same for all.
    """

    points: list[Point]
    machine: str


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description=__doc__)
    parser.add_argument("lines", type=Path, help="JSON lines of `python -m benchmarks.decode`")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    args = parser.parse_args(argv)
    try:
        args.picture.write_text(svg(read(args.lines)))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def read(path: Path) -> Measurements:
    """Reads a file of JSON lines; empty lines do not count.

    Raises:
        ValueError: a line cannot be drawn, or not beside the others, or there is none; the message names file and line.
    """
    points: dict[tuple, Point] = {}
    machine = ""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = _checked(line)
            found = f"{entry['device']}, jax {entry['jax']}"
            machine = machine or found
            if found != machine:
                raise ValueError(f"measured on {found}, where the lines before are of {machine}")
            for point in _points(entry):
                if point[:4] in points:
                    raise ValueError(f"{_named(point)} is on a line before too")
                points[point[:4]] = point
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not points:
        raise ValueError(f"{path}: no lines")
    return Measurements([*points.values()], machine)


def svg(measurements: Measurements) -> str:
    """The picture as SVG text, which depends on the measurements (and matplotlib's version) alone."""
    from matplotlib import style

    text = io.StringIO()
    with style.context(["default", STYLE]):  # whatever the user's matplotlibrc says
        unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        draw(measurements).savefig(text, format="svg", metadata={"Title": _title(measurements), **unsaid})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def draw(measurements: Measurements) -> Figure:
    """The picture as a matplotlib figure. Artists are labelled "nvfp4 pallas", "bf16 floor" and so on."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[7, 5])
    figure.subplots_adjust(left=0.065, right=0.87, top=0.84, bottom=0.24, wspace=0.2)
    points = measurements.points
    _panel(left, [p for p in points if p.batch == 1], "context", CONTEXTS)
    left.set(title="One sequence", xlabel="tokens of context", ylabel="milliseconds a token")
    several = [p for p in points if p.context == CONTEXT_OF_BATCHES]
    _panel(right, several, "batch", BATCHES)
    right.set(title=f"1 to 8 sequences of {CONTEXT_OF_BATCHES:,} tokens", xlabel="sequences")
    right.set_ylabel("milliseconds a step")
    right.tick_params(labelleft=True)
    ends = sorted((p for p in several if p.batch == BATCHES[-1] and p.path == "pallas"), key=lambda p: p.ms)
    for p, side in zip(ends, ("top", "bottom"), strict=False):  # away from each other
        _beside(right, p.ms, f"{p.ms / p.batch:.2f} ms a token", color=COLORS[p.format], va=side)
    figure.suptitle(_title(measurements), x=0.065, y=0.965, ha="left", fontsize=14, fontweight="bold")
    handles = [
        Line2D([], [], color=color, linewidth=5, label=f"{name.upper()} weights") for name, color in COLORS.items()
    ]
    drawn = {p.path for p in points} | {"floor"}
    handles += [Line2D([], [], color="#333333", label=NAMES[kind], **LOOKS[kind]) for kind in LOOKS if kind in drawn]
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.055, 0.055), ncols=len(handles), frameon=False)
    figure.text(0.065, 0.03, NOTE, fontsize=9.5, color="#666666")
    return figure


def _title(measurements: Measurements) -> str:
    return f"Flint's decode step on one {measurements.machine}"


def _panel(axes: Axes, points: list[Point], across: str, ticks: Sequence[int]) -> None:
    """A line for each format and path, and one for each format's floor, over the attribute `across`."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(ticks[0] / 1.15, ticks[-1] * 1.15)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    for name, color in COLORS.items():
        of_format = sorted((p for p in points if p.format == name), key=lambda p: getattr(p, across))
        # A point that was timed in two runs has two floors, alike to the noise of the bandwidth: the later one counts.
        floors = {getattr(p, across): p.floor_ms for p in of_format}
        if floors:
            [line] = axes.plot([*floors], [*floors.values()], color=color, label=f"{name} floor", **LOOKS["floor"])
            if len(floors) == 1:
                line.set(marker="_", markersize=9)
        for path in ("plain", "pallas"):
            line = [p for p in of_format if p.path == path]
            if line:
                x, y = [getattr(p, across) for p in line], [p.ms for p in line]
                bars = [p.ms - p.ms_min for p in line], [p.ms_max - p.ms for p in line]
                axes.errorbar(x, y, bars, color=color, elinewidth=0.9, label=f"{name} {path}", **LOOKS[path])


def _beside(axes: Axes, y: float, text: str, **look: Any) -> None:
    """Text right of a panel, at the height of a value."""
    at = dict(xycoords=("axes fraction", "data"), xytext=(5, 0), textcoords="offset points", annotation_clip=False)
    axes.annotate(text, (1, y), fontsize=10, **at, **look)


def _checked(line: bytes) -> dict[str, Any]:
    """A line's object, with all keys, of a step that has a place in the picture."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError("not JSON") from error
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    missing = [key for key in KEYS if key not in entry]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    model, layers, context, batch = (entry[key] for key in ("model", "layers", "context", "batch"))
    if (model, layers) != ("flint", LAYERS):
        raise ValueError(f"{layers} layers of {model}, where all {LAYERS} of flint are expected")
    if entry["sample"]:
        raise ValueError("the step samples, where a greedy one is expected")
    for key, known in ("format", [*COLORS]), ("path", ["pallas", "plain"]):
        if entry[key] not in known:
            raise ValueError(f"{key} is {entry[key]!r}, not one of {', '.join(known)}")
    for key, (first, *_, last) in ("context", CONTEXTS), ("batch", BATCHES):
        if not isinstance(entry[key], int) or not first <= entry[key] <= last:
            raise ValueError(f"{key} is {entry[key]!r}, not an integer of {first:,} to {last:,}")
    if batch > 1 and context != CONTEXT_OF_BATCHES:
        raise ValueError(
            f"{batch} sequences of {context:,} tokens have no place: several have {CONTEXT_OF_BATCHES:,} each"
        )
    return entry


def _named(point: Point) -> str:
    return f"{point.format} in {NAMES[point.path]}, {point.batch} x {point.context:,} tokens,"


def _points(entry: dict[str, Any]) -> list[Point]:
    """What one line measured: a step, and where it was timed a second time as plain XLA, that."""
    prefixes = {entry["path"]: ""} | ({"plain": "plain_"} if "plain_ms_per_step" in entry else {})
    return [_point(entry, path, prefix) for path, prefix in prefixes.items()]


def _point(entry: dict[str, Any], path: str, prefix: str) -> Point:
    median = entry[f"{prefix}ms_per_step"]
    times = {f"{prefix}{key}": entry.get(f"{prefix}{key}", median) for key in ("ms_min", "ms_per_step", "ms_max")}
    for key, value in (times | {"floor_ms": entry["floor_ms"]}).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{key} is {value!r}, not a positive number")
    if [*times.values()] != sorted(times.values()):
        raise ValueError(f"{', '.join(f'{key} {value}' for key, value in times.items())} do not rise")
    least, median, most = times.values()
    return Point(entry["format"], path, entry["context"], entry["batch"], median, least, most, entry["floor_ms"])


if __name__ == "__main__":
    sys.exit(main())
