"""Time of one decode step at full size: `python -m benchmarks.decode --model flint --format nvfp4 --context 102400`.

Random weights, made on the device. The step runs the engine's layers against the paged cache, then the LM head and a
greedy choice, `--steps` of them in one launch of the host, for exactly `--batch` sequences; the engine's own step also
samples and has a row for each of its slots, busy or not. Prints one JSON line, then a table.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.full_size import MODELS, full_size, streaming_read_bandwidth, with_layers
from modeling.architecture import Config, Model
from modeling.batch import Batch
from modeling.inkling.model import Inkling
from modeling.inkling.mtp import draft, remember
from modeling.parameters import parameter_names


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="flint")
    parser.add_argument("--format", choices=["nvfp4", "bf16"], default="nvfp4")
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache of each sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences that decode together")
    parser.add_argument("--drafts", type=int, default=0, help="tokens drafted and checked a step, for models that can")
    parser.add_argument("--layers", type=int, help="only this many layers, for a small device")
    parser.add_argument("--steps", type=int, default=16, help="tokens a launch")
    parser.add_argument("--repeats", type=int, default=7, help="timed launches")
    args = parser.parse_args(argv)
    config = with_layers(MODELS[args.model], args.layers)
    if not 0 <= args.drafts <= len(config.draft_cache_layers):
        parser.error(f"--drafts must be 0..{len(config.draft_cache_layers)} for {args.model}")
    result = measure(config, args.format, args.context, args.batch, args.steps, args.repeats, args.drafts)
    what = dict(model=args.model, format=args.format, context=args.context, batch=args.batch, drafts=args.drafts)
    print(json.dumps(what | dict(layers=config.num_hidden_layers) | result))
    for name, value in result.items():
        print(f"{name:>24}  {value}", file=sys.stderr)
    return 0


def measure(
    config: Config, weight_format: str, context: int, batch: int, steps: int, repeats: int, drafts: int = 0
) -> dict:
    """Times the plain-XLA decode step, over `repeats` launches.

    With drafts, a step drafts and checks them all, and keeps one token, as random weights would: divide its time by the
    tokens that a real checkpoint accepts.
    """
    max_len = context + steps * (repeats + 2) + drafts
    model, cache, pages = full_size(config, weight_format, batch, max_len, max_chunk=1, num_drafts=drafts)
    leaves, treedef = jax.tree.flatten(model)

    @functools.partial(jax.jit, donate_argnums=1)
    def launch(leaves, cache, tokens, length):
        model = jax.tree.unflatten(treedef, leaves)

        def step(_, carry):
            cache, tokens, length = carry
            rows = tokens[:, None]
            if drafts:
                assert isinstance(model, Inkling)
                drafted, cache = draft(model, tokens, length, jnp.ones(batch, bool), pages, cache)
                rows = jnp.concatenate([rows, drafted], axis=1)
            chunk = Batch(rows, length, jnp.full(batch, 1 + drafts, jnp.int32), pages)
            hidden, cache = model.forward(chunk, cache)
            if drafts:
                assert isinstance(model, Inkling)
                cache = remember(cache, hidden, model.embedded(rows), pages.slot, length, chunk.lengths)
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
    needed, bandwidth = bytes_a_step(model, context, batch, drafts), streaming_read_bandwidth()
    median = statistics.median(times)
    return dict(
        path="plain",
        ms_per_step=round(median, 4),
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


def bytes_a_step(model: Model, context: int, batch: int, drafts: int = 0) -> int:
    """Bytes one step must read: each weight once, the expected number of distinct experts, and the cached tokens.

    The head is read again by each draft.
    """
    config = model.config
    rows = batch * (1 + drafts)
    distinct = config.num_experts * (1 - (1 - config.num_experts_per_tok / config.num_experts) ** rows)
    total = 0.0
    for name, leaf in zip(parameter_names(model), jax.tree.leaves(model), strict=True):
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        if ".experts." in name:
            size *= distinct / config.num_experts
        elif name in ("embed_tokens.weight", "embed.weight"):
            size = rows * config.hidden_size * leaf.dtype.itemsize
        elif name == "unembed.weight":
            size *= 1 + drafts
        total += size
    itemsize = jnp.dtype(model.dtype).itemsize
    for layer in (*config.cache_layers, *config.draft_cache_layers[:drafts]):
        window = config.sliding_window if layer.sliding and config.sliding_window else context
        total += batch * 2 * layer.num_kv_heads * layer.head_dim * itemsize * min(context, window)
        total += batch * sum(layer.conv_channels) * (config.conv_kernel_size - 1) * itemsize
    return int(total)


if __name__ == "__main__":
    sys.exit(main())
