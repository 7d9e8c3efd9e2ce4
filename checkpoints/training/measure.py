"""Measures the two embedded checkpoints on held-out questions, from their files.

    python -m checkpoints.training.measure --per-kind 100

Prints a Markdown table of the accuracies a kind (float32 compute on the stored weights).
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.training.evaluate import accuracy, table
from checkpoints.training.export import NVFP4_FOLDER, Arrays, read_gguf, read_safetensors
from checkpoints.training.forward import forward
from checkpoints.training.pack import Packed, held_out_batch
from checkpoints.training.shape import config as make_config
from checkpoints.training.tokenizer import CHECKPOINT


def measure(params: Arrays, packed: Packed, rows: int = 8) -> dict[str, float]:
    """Accuracy a kind of the given weights."""
    config = make_config()
    weights = {name: jnp.asarray(value) for name, value in params.items()}

    @jax.jit
    def choose(tokens: jax.Array, segments: jax.Array) -> jax.Array:
        return forward(weights, tokens.astype(jnp.int32), segments.astype(jnp.int32), config)[0].argmax(-1)

    return accuracy(lambda tokens, segments: np.asarray(choose(tokens, segments)), packed, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-kind", type=int, default=100)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    packed = held_out_batch(args.per_kind, args.length, args.seed)
    columns = {
        "BF16": measure(read_safetensors(CHECKPOINT), packed),
        "NVFP4": measure(read_gguf(NVFP4_FOLDER), packed),
    }
    print(table({name: dict(sorted(column.items())) for name, column in columns.items()}))
    print({name: float(np.mean(list(column.values()))) for name, column in columns.items()})


if __name__ == "__main__":
    main()
