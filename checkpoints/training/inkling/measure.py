"""Measures the two embedded checkpoints on held-out conversations, from their files.

    python -m checkpoints.training.inkling.measure --per-kind 100

Prints Markdown tables: accuracies a kind, and drafts accepted a round (float32 compute on the stored weights).
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.training.inkling.evaluate import Scores, evaluate, table
from checkpoints.training.inkling.export import NVFP4_FOLDER, Arrays, read
from checkpoints.training.inkling.forward import forward, logits_of
from checkpoints.training.inkling.pack import Packed, held_out_batches
from checkpoints.training.inkling.shape import config as make_config
from checkpoints.training.inkling.tokenizer import CHECKPOINT
from checkpoints.training.inkling.train import rows_of


def measure(params: Arrays, batches: list[Packed]) -> Scores:
    """Scores of the given weights."""
    config = make_config()
    weights = {name: jnp.asarray(value) for name, value in params.items()}

    @jax.jit
    def choose(rows):
        return jnp.stack(
            [logits_of(weights, hidden, config).argmax(-1) for hidden in forward(weights, rows, config).hidden]
        )

    return evaluate(lambda packed: np.asarray(choose(rows_of(packed))), batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-kind", type=int, default=100)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    batches = held_out_batches(args.per_kind, args.rows, 1024, args.seed)
    columns = {name: measure(read(folder), batches) for name, folder in (("BF16", CHECKPOINT), ("NVFP4", NVFP4_FOLDER))}
    print(table({name: dict(sorted(scores.right.items())) for name, scores in columns.items()}))
    print(table({name: dict(sorted(scores.accepted.items())) for name, scores in columns.items()}, "{:.2f}"))
    for name, scores in columns.items():
        mean, accepted = (float(np.mean(list(part.values()))) for part in (scores.right, scores.accepted))
        print(f"{name}: mean {mean:.4f}, accepted a round {accepted:.2f}, by depth {scores.by_depth}")


if __name__ == "__main__":
    main()
