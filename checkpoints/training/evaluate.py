"""Accuracy a kind of question on held-out conversations: the share of last turns that are right to the last token.

A turn is right if every token the model must produce, the end marker included, is its first choice given the ones
before it: exactly when greedy decoding would produce that turn.
"""

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from checkpoints.training.pack import Packed

Choose = Callable[
    [np.ndarray, np.ndarray], np.ndarray
]  # tokens, segments [rows, length] -> first choices [rows, length]


def accuracy(choose: Choose, packed: Packed, rows: int) -> dict[str, float]:
    """Share of right turns a kind. `choose` is called with `rows` rows at a time."""
    right: dict[str, list[bool]] = defaultdict(list)
    for start in range(0, len(packed.tokens), rows):
        part = slice(start, start + rows)
        tokens, segments, produced = (_padded(a[part], rows) for a in (packed.tokens, packed.segments, packed.produced))
        chosen = np.asarray(choose(tokens, segments))
        wrong = produced[:, 1:] & (chosen[:, :-1] != tokens[:, 1:])
        for (row, segment), kind in packed.kinds.items():
            if start <= row < start + rows:
                right[kind].append(not wrong[row - start][segments[row - start, 1:] == segment].any())
    return {kind: float(np.mean(values)) for kind, values in right.items()}


def _padded(array: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(array, ((0, rows - len(array)), (0, 0)))


def table(columns: dict[str, dict[str, float]]) -> str:
    """A Markdown table of accuracies, one line a kind."""
    lines = [f"| kind | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    kinds = next(iter(columns.values()))
    rows = (f"| {kind} | {' | '.join(f'{100 * column[kind]:.1f}%' for column in columns.values())} |" for kind in kinds)
    return "\n".join([*lines, *rows])
