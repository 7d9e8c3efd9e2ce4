"""Time of prefill at full size: `python -m benchmarks.prefill --model flint --format nvfp4 --tokens 8192`.

Random weights, made on the device; one sequence, a chunk at a time against the paged cache, as the engine does. Prints
one JSON line, then a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.full_size import MODELS, full_size, matrix_rate, with_layers
from modeling.architecture import Config
from modeling.batch import Batch
from modeling.cache import Cache
from modeling.flint.config import FlintConfig


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefill", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="flint")
    parser.add_argument("--format", choices=["nvfp4", "bf16"], default="nvfp4")
    parser.add_argument("--tokens", type=int, default=8192, help="length of the prompt")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens a step")
    parser.add_argument("--layers", type=int, help="only this many layers, for a small device")
    parser.add_argument("--repeats", type=int, default=3, help="timed prompts")
    args = parser.parse_args(argv)
    if args.tokens % min(args.chunk, args.tokens):
        parser.error(f"--tokens {args.tokens} is not a multiple of --chunk {args.chunk}")
    config = with_layers(MODELS[args.model], args.layers)
    result = measure(config, args.format, args.tokens, min(args.chunk, args.tokens), args.repeats)
    print(
        json.dumps(
            dict(model=args.model, format=args.format, tokens=args.tokens, layers=config.num_hidden_layers, **result)
        )
    )
    for name, value in result.items():
        print(f"{name:>24}  {value}", file=sys.stderr)
    return 0


def measure(config: Config, weight_format: str, tokens: int, chunk: int, repeats: int) -> dict:
    """Times whole prompts, logits of the last position included."""
    model, cache, pages = full_size(config, weight_format, 1, tokens + chunk, chunk)
    leaves, treedef = jax.tree.flatten(model)
    step = jax.jit(prefill_step(treedef), donate_argnums=1)
    ids = jax.random.randint(jax.random.key(2), (1, chunk), 0, config.vocab_size, jnp.int32)
    started = time.perf_counter()
    cache, logits = jax.block_until_ready(step(leaves, cache, ids, jnp.zeros(1, jnp.int32), pages))
    compile_s = time.perf_counter() - started
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for start in range(0, tokens, chunk):
            cache, logits = step(leaves, cache, ids, jnp.full(1, start, jnp.int32), pages)
        logits.block_until_ready()
        times.append(time.perf_counter() - started)
    median, rate = statistics.median(times), matrix_rate()
    work = flops(config, tokens)
    return dict(
        path="plain",
        chunk=chunk,
        ms=round(median * 1e3, 1),
        ms_min=round(min(times) * 1e3, 1),
        ms_max=round(max(times) * 1e3, 1),
        tokens_per_s=round(tokens / median, 1),
        tflop_s=round(work / median / 1e12, 2),
        matrix_tflop_s=round(rate / 1e12, 1),
        fraction_of_matrix_rate=round(work / median / rate, 4),
        compile_s=round(compile_s, 1),
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
    )


def prefill_step(treedef: Any) -> Callable:
    """One chunk of one sequence: a function (leaves, cache, ids, start, pages) -> (cache, logits), not jitted.

    Args:
        treedef: of the model, whose leaves the function takes.
    """

    def step(leaves, cache: Cache, ids, start, pages) -> tuple[Cache, jax.Array]:
        model = jax.tree.unflatten(treedef, leaves)
        hidden, cache = model.forward(Batch(ids, start, jnp.full(1, ids.shape[1], jnp.int32), pages), cache)
        return cache, model.logits(hidden[:, -1])

    return step


def flops(config: Config, tokens: int) -> float:
    """Multiply-adds times two that a prompt needs: linear layers on the selected experts, and visible keys."""
    c = config
    total = 0.0
    for layer, (kind, sparse) in enumerate(zip(c.layer_types, c.sparse_layers, strict=True)):
        if isinstance(c, FlintConfig):
            heads, kv_heads, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
            attention = c.hidden_size * d * 2 * (heads + kv_heads)
            shared = c.shared_expert_intermediate_size
        else:
            heads, kv_heads, d = c.num_heads(kind), c.num_kv_heads(kind), c.head_dim_of(kind)
            attention = c.hidden_size * (d * 2 * (heads + kv_heads) + heads * c.d_rel) + heads * c.d_rel * c.extent(
                kind
            )
            shared = c.num_shared_experts * c.moe_intermediate_size
        width = c.num_experts_per_tok * c.moe_intermediate_size + shared if sparse else c.intermediate_size
        total += tokens * (attention + 3 * c.hidden_size * width + (c.num_experts * c.hidden_size if sparse else 0))
        window = min(c.window(layer) or tokens, tokens)
        keys = tokens * window - window * (window - 1) / 2
        total += 2 * heads * d * keys  # q.k and p.v
    return 2 * (total + c.vocab_size * c.hidden_size)


if __name__ == "__main__":
    sys.exit(main())
