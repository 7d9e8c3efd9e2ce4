"""Accuracy a kind of held-out conversation, and how many drafted tokens a round accepts.

A turn is right if every token the model must produce, the end marker included, is its first choice given the ones
before it: exactly when greedy decoding would produce that turn. Drafts are then counted as the engine would: a round
drafts one token a depth behind the newest one, and accepts those before the first wrong one.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from checkpoints.training.inkling.pack import Packed

Choose = Callable[[Packed], np.ndarray]  # -> first choices [1 + depths, rows, length] of the trunk and of each depth


class Scores(NamedTuple):
    """Shares of right turns by kind; over the right ones, accepted drafts a round by kind, and by depth the share of
    rounds that accept at least so many."""

    right: dict[str, float]
    accepted: dict[str, float]
    by_depth: list[float]


def evaluate(choose: Choose, batches: list[Packed]) -> Scores:
    """Scores of the last turns of all conversations."""
    right: dict[str, list[bool]] = defaultdict(list)
    rounds: dict[str, list[int]] = defaultdict(list)
    depths = 0
    for packed in batches:
        chosen = np.asarray(choose(packed))
        depths = len(chosen) - 1
        for (row, start, end), kind in packed.last.items():
            tokens, mine = packed.tokens[row, :end], chosen[:, row, :end]
            right[kind].append(bool((mine[0, start - 1 : end - 1] == tokens[start:end]).all()))
            if right[kind][-1]:
                rounds[kind] += accepted_by_round(tokens, mine[1:], start)
    every = np.concatenate([np.array(values, int) for values in rounds.values()] or [np.zeros(0, int)])
    return Scores(
        {kind: float(np.mean(values)) for kind, values in right.items()},
        {kind: float(np.mean(values)) for kind, values in rounds.items() if values},
        [float((every > depth).mean()) for depth in range(depths)] if len(every) else [],
    )


def accepted_by_round(tokens: np.ndarray, drafts: np.ndarray, start: int) -> list[int]:
    """Accepted drafts of each round.

    Args:
        tokens: [length], the conversation up to its end.
        drafts: [depths, length], depth n's first choice for the token at p + n + 2.
        start: the first token to produce, which the prompt's own step gives.
    """
    newest, counts = start, []
    while newest < len(tokens) - 1:
        wanted = tokens[newest + 1 : newest + 1 + len(drafts)]
        same = drafts[: len(wanted), newest - 1] == wanted
        accepted = len(same) if same.all() else int(same.argmin())
        counts.append(accepted)
        newest += accepted + 1
    return counts


def table(columns: dict[str, dict[str, float]], form: str = "{:.1%}") -> str:
    """A Markdown table, one line a kind."""
    lines = [f"| kind | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    kinds = next(iter(columns.values()))
    rows = (f"| {kind} | {' | '.join(form.format(column[kind]) for column in columns.values())} |" for kind in kinds)
    return "\n".join([*lines, *rows])
