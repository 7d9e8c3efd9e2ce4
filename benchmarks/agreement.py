"""Whether the fused decode step and the plain one agree at full size: `python -m benchmarks.agreement --format nvfp4`.

Random weights and a random cache, one step of each path for the same tokens. A chain of random layers amplifies every
rounding, so no fixed tolerance means anything after 49 of them. What the two paths may differ by is therefore measured
on the plain path itself: by how much its logits move when each element of the token embeddings moves to its next
bfloat16 number. Gives exit code 1 if the fused step differs by more than 1.25 times as much, for two disturbances of
the last bit do not weigh quite the same, or if the bound is above 0.5 and says nothing. Prints one JSON line, then a
table.
"""

from __future__ import annotations

import argparse
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.full_size import MODELS, abstract_model, full_size, with_layers
from modeling.architecture import Model
from modeling.batch import Batch
from modeling.cache import Cache, PageTables
from modeling.flint.model import Flint
from modeling.kernels import KernelsError, choose_kernels, with_kernels


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=__doc__)
    parser.add_argument("--format", choices=["nvfp4", "bf16"], default="nvfp4")
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache of each sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences that decode together")
    parser.add_argument("--layers", type=int, help="only this many layers")
    args = parser.parse_args(argv)
    if min(args.batch, args.context) < 1:
        parser.error(f"--batch and --context are 1 or more, not {args.batch} and {args.context}")
    config = with_layers(MODELS["flint"], args.layers)
    try:
        kernels = choose_kernels(abstract_model(config, args.format), "pallas", args.batch, jax.devices()[0])
    except KernelsError as error:
        parser.error(str(error))
    model, cache, pages = full_size(config, args.format, args.batch, args.context + 1, max_chunk=1)
    assert isinstance(model, Flint)
    plain = logits(model, cache, pages, args.context)
    found = compared(plain, logits(with_kernels(model, kernels), cache, pages, args.context))
    bound = compared(plain, logits(nudged(model, args.batch), cache, pages, args.context))
    result = dict(fused=found, plain_nudged=bound)
    print(
        json.dumps(dict(format=args.format, context=args.context, batch=args.batch, layers=len(model.layers)) | result)
    )
    for name, values in result.items():
        print(f"{name:>12}  {values}", file=sys.stderr)
    return 0 if found["relative_error"] <= 1.25 * bound["relative_error"] < 0.5 else 1


def logits(model: Model, cache: Cache, pages: PageTables, context: int) -> np.ndarray:
    """Of one step after `context` tokens of each sequence, sequence i fed token i: [batch, vocab_size] float32."""
    batch = pages.slot.shape[0]
    lengths = jnp.full(batch, context, jnp.int32)
    leaves, treedef = jax.tree.flatten(model)

    @jax.jit
    def step(leaves, cache, pages):
        model = jax.tree.unflatten(treedef, leaves)
        inputs = Batch(jnp.arange(batch, dtype=jnp.int32)[:, None], lengths, jnp.ones(batch, jnp.int32), pages)
        hidden, _ = model.forward(inputs, cache)
        return model.logits(hidden[:, 0])

    return np.asarray(step(leaves, cache, pages), np.float64)


def nudged(model: Flint, batch: int) -> Flint:
    """The model with the embeddings of the first `batch` tokens one bfloat16 number further from zero."""
    moved = with_kernels(model, None)
    assert isinstance(moved, Flint)
    weight = moved.embed_tokens.weight[...]
    bits = lax.bitcast_convert_type(weight[:batch], jnp.uint16) + jnp.uint16(1)
    moved.embed_tokens.weight = type(moved.embed_tokens.weight)(
        weight.at[:batch].set(lax.bitcast_convert_type(bits, weight.dtype))
    )
    return moved


def compared(want: np.ndarray, got: np.ndarray) -> dict[str, float]:
    """The relative error in the 2-norm, its largest value over sequences, and the share of equal greedy choices."""
    by_row = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    return dict(
        relative_error=float(f"{np.linalg.norm(got - want) / np.linalg.norm(want):.3g}"),
        worst_sequence=float(f"{by_row.max():.3g}"),
        equal_choices=float(f"{(got.argmax(1) == want.argmax(1)).mean():.3g}"),
    )


if __name__ == "__main__":
    sys.exit(main())
