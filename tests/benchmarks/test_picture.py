"""The picture of decode times: it draws what the lines say, and says what it cannot draw."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from benchmarks import picture

ROOT = Path(__file__).parents[2]
DATA, PICTURE = ROOT / "docs/decode-h200.jsonl", ROOT / "docs/decode.svg"
CONTEXTS, BATCHES = (1024, 8192, 102400, 262144), (2, 4, 8)
STEPS = [(context, 1) for context in CONTEXTS] + [(8192, batch) for batch in BATCHES]


def line(number: int, **changes) -> dict:
    """A line as `benchmarks.decode` prints it; its times are made up and all different."""
    ms = 2 + number / 8
    times = dict(ms_per_step=ms, ms_per_token=ms, ms_min=ms - 0.03, ms_max=ms + 0.06)
    plain = {f"plain_{key}": 5 * value for key, value in times.items()}
    what = dict(model="flint", format="nvfp4", context=1024, batch=1, drafts=0, sample=False, layers=49, path="pallas")
    where = dict(floor_ms=ms / 4, device="NVIDIA H200", jax="0.11.2")
    return what | times | plain | where | changes


def without_plain(entry: dict) -> dict:
    return {key: value for key, value in entry.items() if not key.startswith("plain_")}


@pytest.fixture
def file(tmp_path):
    def write(*entries: dict) -> Path:
        path = tmp_path / "lines.jsonl"
        path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
        return path

    return write


@pytest.fixture
def everything() -> list[dict]:
    cases = itertools.product(("nvfp4", "bf16"), STEPS)
    entries = [line(i, format=name, context=context, batch=batch) for i, (name, (context, batch)) in enumerate(cases)]
    return entries[::-1]  # in no order of context


def drawn(figure) -> list[dict[str, dict[float, float]]]:
    """Each panel's lines by label, as {x: y}."""
    FigureCanvasAgg(figure).draw()  # what cannot be drawn would fail here
    found = []
    for axes in figure.axes:
        lines = {bars.get_label(): bars.lines[0] for bars in axes.containers}
        lines |= {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
        found.append({label: dict(zip(*line.get_data(), strict=True)) for label, line in lines.items()})
        assert all([*points] == sorted(points) for points in found[-1].values())
    return found


def expected(entries: list[dict], across: str) -> dict[str, dict[float, float]]:
    found = {}
    for entry in entries:
        for kind, key in ("pallas", "ms_per_step"), ("plain", "plain_ms_per_step"), ("floor", "floor_ms"):
            if key in entry:
                found.setdefault(f"{entry['format']} {kind}", {})[entry[across]] = entry[key]
    return found


def test_every_number_is_drawn_where_it_belongs(file, everything):
    figure = picture.draw(picture.read(file(*everything)))
    left, right = drawn(figure)
    assert left == expected([entry for entry in everything if entry["batch"] == 1], "context")
    assert right == expected([entry for entry in everything if entry["context"] == 8192], "batch")
    assert len(left) == len(right) == 6
    for axes in figure.axes:
        (low, high), (least, most) = axes.get_xlim(), axes.get_ylim()
        for points in drawn(figure)[figure.axes.index(axes)].values():
            assert all(low < x < high and least < y < most for x, y in points.items())


def test_error_bars_reach_from_the_fastest_to_the_slowest_launch(file, everything):
    figure = picture.draw(picture.read(file(*everything)))
    for axes, across in zip(figure.axes, ("context", "batch"), strict=True):
        for bars in axes.containers:
            name, path = bars.get_label().split()
            prefix = "plain_" if path == "plain" else ""
            ends = {x: (low, high) for (x, low), (_, high) in bars.lines[2][0].get_segments()}
            entries = {
                entry[across]: entry
                for entry in everything
                if entry["format"] == name
                and (entry["batch"] == 1 if across == "context" else entry["context"] == 8192)
            }
            assert ends.keys() == entries.keys()
            for x, entry in entries.items():
                assert ends[x] == pytest.approx((entry[f"{prefix}ms_min"], entry[f"{prefix}ms_max"]))


def test_words(file, everything):
    figure = picture.draw(picture.read(file(*everything)))
    assert figure.get_suptitle() == "Flint's decode step on one NVIDIA H200, jax 0.11.2"
    [legend] = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["NVFP4 weights", "BF16 weights", "fused kernels", "plain XLA", "floor"]
    shares = {entry["ms_per_step"] / 8 for entry in everything if entry["batch"] == 8}
    assert {text.get_text() for text in figure.axes[1].texts} == {f"{share:.2f} ms a token" for share in shares}


def test_missing_points_are_not_drawn(file):
    entries = [
        without_plain(line(0)),
        line(1, context=8192),
        without_plain(line(2, context=8192, format="bf16", batch=4)),
    ]
    del entries[0]["ms_min"], entries[0]["ms_max"]
    figure = picture.draw(picture.read(file(*entries)))
    left, right = drawn(figure)
    assert left == expected(entries[:2], "context")
    assert [*left["nvfp4 pallas"]] == [1024, 8192]
    assert [*left["nvfp4 plain"]] == [8192]
    assert right == expected(entries[1:], "batch")
    assert right.keys() == {"nvfp4 floor", "nvfp4 plain", "nvfp4 pallas", "bf16 floor", "bf16 pallas"}
    assert not figure.axes[1].texts
    # A line of one point is a marker.
    for axes in figure.axes:
        for artist in axes.lines:
            assert len(artist.get_xdata()) > 1 or artist.get_marker() != "None"
    [bare] = [bars for bars in figure.axes[0].containers if bars.get_label() == "nvfp4 pallas"]
    assert [low == high for (_, low), (_, high) in bare.lines[2][0].get_segments()] == [True, False]


def test_one_line_is_enough_and_without_plain_the_legend_has_none(file):
    figure = picture.draw(picture.read(file(without_plain(line(0)))))
    assert drawn(figure) == [{"nvfp4 floor": {1024: 0.5}, "nvfp4 pallas": {1024: 2}}, {}]
    assert "plain XLA" not in [text.get_text() for text in figure.legends[0].get_texts()]


def test_plain_xla_timed_alone_is_plain_too(file):
    kernels, alone = without_plain(line(0)), without_plain(line(8, path="plain"))
    left, _ = drawn(picture.draw(picture.read(file(kernels, alone))))
    assert (left["nvfp4 pallas"], left["nvfp4 plain"]) == ({1024: 2}, {1024: 3})


def test_empty_lines_do_not_count(file):
    path = file(line(0), line(1, context=4096))
    alike = picture.read(path)
    path.write_text("\n" + path.read_text().replace("\n", "\n \n"))
    assert picture.read(path) == alike


def refused(capsys, path: Path) -> str:
    out = path.with_name("out.svg")
    with pytest.raises(SystemExit) as stop:
        picture.main([str(path), str(out)])
    assert stop.value.code == 2
    assert not out.exists()
    return capsys.readouterr().err.splitlines()[-1].removeprefix("python -m benchmarks.picture: error: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "inkling"}, "49 layers of inkling, where all 49 of flint are expected"),
        ({"layers": 17}, "17 layers of flint, where all 49 of flint are expected"),
        ({"sample": True}, "the step samples, where a greedy one is expected"),
        ({"format": "int8"}, "format is 'int8', not one of nvfp4, bf16"),
        ({"format": ["nvfp4"]}, "format is ['nvfp4'], not one of nvfp4, bf16"),
        ({"path": "auto"}, "path is 'auto', not one of pallas, plain"),
        ({"context": 512}, "context is 512, not an integer of 1,024 to 262,144"),
        ({"context": "8192"}, "context is '8192', not an integer of 1,024 to 262,144"),
        ({"batch": 9, "context": 8192}, "batch is 9, not an integer of 1 to 8"),
        ({"batch": 4}, "4 sequences of 1,024 tokens have no place: several have 8,192 each"),
        ({"ms_per_step": 0}, "ms_per_step is 0, not a positive number"),
        ({"ms_max": float("nan")}, "ms_max is nan, not a positive number"),
        ({"plain_ms_min": "1"}, "plain_ms_min is '1', not a positive number"),
        ({"floor_ms": None}, "floor_ms is None, not a positive number"),
        ({"ms_min": 3.5}, "ms_min 3.5, ms_per_step 2.0, ms_max 2.06 do not rise"),
        (
            {"device": "NVIDIA GB200"},
            "measured on NVIDIA GB200, jax 0.11.2, where the lines before are of NVIDIA H200, jax 0.11.2",
        ),
        (
            {"jax": "0.12.0"},
            "measured on NVIDIA H200, jax 0.12.0, where the lines before are of NVIDIA H200, jax 0.11.2",
        ),
        ({"context": 4096}, "nvfp4 in fused kernels, 1 x 4,096 tokens, is on a line before too"),
    ],
)
def test_what_cannot_be_drawn(file, capsys, changes, message):
    path = file(line(1, context=4096), line(0, **changes))
    assert refused(capsys, path) == f"{path}, line 2: {message}"


@pytest.mark.parametrize("key", picture.KEYS)
def test_missing_keys(file, capsys, key):
    entry = line(0)
    del entry[key]
    assert refused(capsys, path := file(entry)) == f"{path}, line 1: {key} missing"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"decode runs on Pallas kernels\n", ", line 1: not JSON"),
        (b'\n{"model": "flint"\n', ", line 2: not JSON"),
        (b"\xff\xfe\xfd\n", ", line 1: not JSON"),
        (b"[1]\n", ", line 1: not a JSON object"),
        (b"{}\n", f", line 1: {', '.join(picture.KEYS)} missing"),
        (b"", ": no lines"),
        (b"\n \n", ": no lines"),
    ],
)
def test_what_is_no_line(tmp_path, capsys, data, message):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(data)
    assert refused(capsys, path) == f"{path}{message}"


def test_files_that_cannot_be_read_or_written(file, tmp_path, capsys):
    assert "No such file" in refused(capsys, tmp_path / "absent.jsonl")
    with pytest.raises(SystemExit, match="2"):
        picture.main([str(file(line(0))), str(tmp_path / "absent" / "out.svg")])
    assert "No such file" in capsys.readouterr().err


def test_the_committed_picture_is_of_the_committed_lines(tmp_path):
    """To the byte, with the matplotlib of requirements/test.txt; the module's docstring has the command."""
    assert picture.main([str(DATA), str(tmp_path / "decode.svg")]) == 0
    assert (tmp_path / "decode.svg").read_text() == PICTURE.read_text()


def test_the_same_lines_give_the_same_text(file, everything):
    measured = picture.read(file(*everything))
    text = picture.svg(measured)
    assert picture.svg(measured) == text
    assert "<title>Flint's decode step on one NVIDIA H200, jax 0.11.2</title>" in text
    assert "dc:date" not in text
    assert "fill: #ffffff" in text  # a background of its own, for dark viewers


def test_reading_and_help_import_neither_matplotlib_nor_jax():
    program = f"""
import sys
from pathlib import Path
from benchmarks import picture
picture.read(Path({str(DATA)!r}))
try:
    picture.main(['--help'])
except SystemExit as stop:
    assert not stop.code
assert not {{'matplotlib', 'jax'}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
