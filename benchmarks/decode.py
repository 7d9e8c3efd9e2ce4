"""Time of one decode step at full size: `python -m benchmarks.decode --model flint --format nvfp4 --context 102400`.

Random weights, made on the device. The step runs the engine's layers against the paged cache, then the LM head and a
greedy choice, `--steps` of them in one launch of the host, for exactly `--batch` sequences; the engine's own step also
samples and has a row for each of its slots, busy or not. Prints one JSON line, then a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.full_size import MODELS, full_size, streaming_read_bandwidth
from modeling.batch import Batch
from modeling.flint.config import SLIDING, FlintConfig
from modeling.flint.model import Flint
from modeling.parameters import parameter_names


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="flint")
    parser.add_argument("--format", choices=["nvfp4", "bf16"], default="nvfp4")
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache of each sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences that decode together")
    parser.add_argument("--layers", type=int, help="only this many layers, for a small device")
    parser.add_argument("--steps", type=int, default=16, help="tokens a launch")
    parser.add_argument("--repeats", type=int, default=7, help="timed launches")
    args = parser.parse_args(argv)
    config = MODELS[args.model]
    if args.layers:
        config = dataclasses.replace(config, num_hidden_layers=args.layers, layer_types=(), sparse_layers=())
    result = measure(config, args.format, args.context, args.batch, args.steps, args.repeats)
    print(json.dumps(dict(model=args.model, format=args.format, context=args.context, batch=args.batch, **result)))
    for name, value in result.items():
        print(f"{name:>24}  {value}", file=sys.stderr)
    return 0


def measure(config: FlintConfig, weight_format: str, context: int, batch: int, steps: int, repeats: int) -> dict:
    """Times the plain-XLA decode step; milliseconds a token (one step), over `repeats` launches."""
    max_len = context + steps * (repeats + 2)
    model, cache, pages = full_size(config, weight_format, batch, max_len, max_chunk=1)
    leaves, treedef = jax.tree.flatten(model)

    @functools.partial(jax.jit, donate_argnums=1)
    def launch(leaves, cache, tokens, length):
        model = jax.tree.unflatten(treedef, leaves)

        def step(_, carry):
            cache, tokens, length = carry
            chunk = Batch(tokens[:, None], length, jnp.ones(batch, jnp.int32), pages)
            hidden, cache = model.forward(chunk, cache)
            tokens = jnp.argmax(model.logits(hidden[:, 0]), -1).astype(jnp.int32)
            return cache, tokens, length + 1

        return lax.fori_loop(0, steps, step, (cache, tokens, length))

    started = time.perf_counter()
    tokens, length = jnp.zeros(batch, jnp.int32), jnp.full(batch, context, jnp.int32)
    cache, tokens, length = jax.block_until_ready(launch(leaves, cache, tokens, length))
    compile_s = time.perf_counter() - started
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        cache, tokens, length = jax.block_until_ready(launch(leaves, cache, tokens, length))
        times.append((time.perf_counter() - started) / steps * 1e3)
    needed, bandwidth = bytes_a_step(model, context, batch), streaming_read_bandwidth()
    median = statistics.median(times)
    return dict(
        path="plain",
        ms_per_token=round(median, 4),
        ms_min=round(min(times), 4),
        ms_max=round(max(times), 4),
        bytes_per_token=needed,
        streaming_read_tb_s=round(bandwidth / 1e12, 3),
        fraction_of_bandwidth=round(needed / (median * 1e-3) / bandwidth, 4),
        compile_s=round(compile_s, 1),
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
    )


def bytes_a_step(model: Flint, context: int, batch: int) -> int:
    """Bytes one step must read: each weight once, the expected number of distinct experts, and the cached tokens."""
    config = model.config
    distinct = config.num_experts * (1 - (1 - config.num_experts_per_tok / config.num_experts) ** batch)
    total = 0.0
    for name, leaf in zip(parameter_names(model), jax.tree.leaves(model), strict=True):
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        if ".experts." in name:
            size *= distinct / config.num_experts
        elif name.startswith("embed_tokens"):
            size = batch * config.hidden_size * leaf.dtype.itemsize
        total += size
    row = 2 * config.num_key_value_heads * config.head_dim * jnp.dtype(model.dtype).itemsize
    for kind in config.layer_types:
        window = config.sliding_window if kind == SLIDING and config.sliding_window else context
        total += batch * row * min(context, window)
    return int(total)


if __name__ == "__main__":
    sys.exit(main())
