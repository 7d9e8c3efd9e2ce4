"""What a compiled GPU program launches, read from the text that XLA's `xla_dump_to` leaves behind.

XLA runs a program as a sequence of thunks: kernels, copies, loops, and command buffers (CUDA graphs) that hold others.
The text is an indented list; a loop's thunks follow `condition:` and `body:`, a conditional's `branch_0:` and so on.

    003: kWhile [prev=002 (1) | sink        ]
    condition:
        004: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] ...
      body:
        000: kCommandBuffer [source | sink]
            005: kCustomKernel [source       | next=006 (1)] gemv grid: [16, 1, 1] ...
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_THUNK = re.compile(r"( *)(\d+): (k\w+) +\[[^\]]*\] ?(\S*)")
_LABEL = re.compile(r"( *)(condition|body|\w*branch\w*):")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%(\S+) = .*? ([a-z][a-z0-9-]*)\(")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ANNOTATION = re.compile(r'profile_annotation: "([^"]*)"\s*(?:thunk_id: (\d+))?')

_KERNELS = ("kKernel", "kCustomKernel", "kCustomCall")
_NAMES = {
    "__gpu$xla.gpu.triton": "pallas_triton",
    "mosaic_gpu_v2": "mosaic_gpu",
    "kCopy": "copy",
    "kMemzero": "memset",
    "kMemset32BitValue": "memset",
    "kGemm": "cublas",
    "kCublasLtMatmul": "cublas",
}


@dataclasses.dataclass
class Thunk:
    """One thunk.

    Attributes:
        kind: "kCustomKernel", "kCopy", "kWhile", "kCommandBuffer", ...
        name: a kernel's name, as in its PTX.
        operation: the HLO operation it comes from: "fusion", or a custom call's target.
        trips: how often a loop runs, if XLA knows; it then reads no condition.
        parts: the thunks inside, by label; a command buffer's are at "".
    """

    kind: str
    name: str
    operation: str = ""
    trips: int | None = None
    parts: dict[str, list[Thunk]] = dataclasses.field(default_factory=dict)

    def what(self) -> str:
        """What it is to a reader of counts: "fusion", "pallas_triton", "copy", ..., else XLA's own name for it."""
        name = self.operation if self.kind in _KERNELS and self.operation else self.kind
        return _NAMES.get(name, name)


@dataclasses.dataclass
class _Open:
    """A thunk whose parts are being read, and the part at hand."""

    indent: int
    thunk: Thunk
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Launch:
    """A thunk that a run of the program reaches, how often, and whether a command buffer holds it."""

    thunk: Thunk
    times: int
    captured: bool


def parse(sequence: str, metadata: str, hlo: str) -> list[Thunk]:
    """The thunks of a program, from its dumps `thunk_sequence*`, `thunk_metadata` and `*_after_optimizations`."""
    instructions = {int(thunk_id): name for name, thunk_id in _ANNOTATION.findall(metadata) if thunk_id}
    operations, trips = _operations(hlo)
    root = Thunk("", "")
    around = [_Open(-1, root)]  # the thunks that the current line is in
    for line in sequence.replace("No thunks.", "\n").splitlines():  # of an empty branch; XLA ends no line after it
        if label := _LABEL.fullmatch(line.rstrip()):
            # XLA writes `condition:` without its indentation; it always follows its loop.
            while label[2] != "condition" and around[-1].indent >= len(label[1]):
                around.pop()
            around[-1].label = label[2]
        elif found := _THUNK.match(line):
            indent, instruction = len(found[1]), instructions.get(int(found[2]), "")
            while around[-1].indent >= indent:
                around.pop()
            thunk = Thunk(found[3], found[4], operations.get(instruction, ""), trips.get(instruction))
            around[-1].thunk.parts.setdefault(around[-1].label, []).append(thunk)
            around.append(_Open(indent, thunk))
        elif line.strip():
            raise ValueError(f"not a line of a thunk sequence: {line!r}")
    return root.parts.get("", [])


def launches(thunks: list[Thunk], times: int = 1, captured: bool = False) -> Iterator[Launch]:
    """Everything that one run of `thunks` reaches, command buffers, loops and conditionals among it.

    A loop counts as often as it runs, or once if that is not known, and so does what it runs. Of a conditional counts
    the branch with the most launches.
    """
    for thunk in thunks:
        if not thunk.parts and thunk.kind.endswith("Done"):
            continue  # waits for what an asynchronous thunk has launched
        yield Launch(thunk, times, captured)
        inside = captured or thunk.kind == "kCommandBuffer"
        if thunk.kind == "kWhile":
            if thunk.trips is None:
                yield from launches(thunk.parts["condition"], times, inside)
            yield from launches(thunk.parts.get("body", []), times * (thunk.trips or 1), inside)
        elif thunk.parts:
            branches = [list(launches(part, times, inside)) for part in thunk.parts.values()]
            yield from max(branches, key=len)


def _operations(hlo: str) -> tuple[dict[str, str], dict[str, int]]:
    """By instruction: its opcode or custom call target; and, of loops whose number of turns is known, that number."""
    operations, trips = {}, {}
    for line in hlo.splitlines():
        if found := _INSTRUCTION.match(line):
            target = _TARGET.search(line) if found[2] == "custom-call" else None
            operations[found[1]] = target[1] if target else found[2]
            if found[2] == "while" and (known := _TRIPS.search(line)):
                trips[found[1]] = int(known[1])
    return operations, trips
