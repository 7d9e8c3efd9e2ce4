"""Collecting everything wrong with a checkpoint, so that one message names all of it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from modeling.errors import CheckpointError

# Up to this many tensors with one fault are listed one a line; more are summarised an expert stack a line.
LISTED = 64


class Faults:
    """What is wrong with one checkpoint, in the order found."""

    def __init__(self, subject: object):
        self.subject = subject
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        """Notes one fault."""
        self.lines.append(line)

    def add_names(self, what: str, names: Iterable[str]) -> None:
        """Notes the same fault of several tensors, experts of one stack on one line when there are many."""
        self.lines += [f"{what}: {line}" for line in grouped(sorted(names, key=_natural))]

    def raise_any(self, outcome: str) -> None:
        """Raises if anything was noted. `outcome` says how far the loader had come.

        Raises:
            CheckpointError: names every fault, a line each.
        """
        if self.lines:
            count = "1 fault" if len(self.lines) == 1 else f"{len(self.lines)} faults"
            raise CheckpointError(f"{self.subject}: {count}; {outcome}\n  " + "\n  ".join(self.lines))


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 10 after layer 2."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def grouped(names: Sequence[str]) -> list[str]:
    """Names as they are, or when there are many, `...experts.{0-7,9}.gate_proj.weight` for experts of one stack."""
    if len(names) <= LISTED:
        return list(names)
    stacks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name in names:
        match = re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", name)
        head, expert, tail = match.groups() if match else (name, -1, "")
        stacks[head, tail].append(int(expert))
    return [
        head if experts == [-1] else f"{head}{{{ranges(sorted(experts))}}}{tail} ({len(experts)} tensors)"
        for (head, tail), experts in stacks.items()
    ]


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as `0-7,9`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
