"""Time of one decode step at full size: `python -m benchmarks.decode --model flint --format nvfp4 --context 102400`.

Random weights, made on the device. The step runs the engine's layers against the paged cache, then the LM head and the
choice of a token, `--steps` of them in one launch of the host, for exactly `--batch` sequences; the engine has a row
for each of its slots, busy or not. By default it is timed twice: as fused kernels, and as plain XLA, whose figures are
named `plain_...`. Prints one JSON line, then a table.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.full_size import MODELS, full_size, streaming_read_bandwidth, with_layers
from modeling.architecture import Config, Model
from modeling.batch import Batch
from modeling.cache import Cache, PageTables
from modeling.inkling.model import Inkling
from modeling.inkling.mtp import draft, remember
from modeling.kernels import KernelsError, choose_kernels, with_kernels
from modeling.parameters import parameter_names
from modeling.sampling import SamplingState, make_sampling_state, record, sample
from pallas_kernels.deviceless import Report
from pallas_kernels.thunks import parse

PATHS = ("auto", "pallas", "plain", "both")


class Rows(NamedTuple):
    """What goes from step to step beside the cache.

    Attributes:
        tokens: [batch] int32, the newest token of each sequence.
        length: [batch] int32, tokens in the cache.
        sampling: None for greedy choices.
    """

    tokens: jax.Array
    length: jax.Array
    sampling: SamplingState | None = None


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
    parser.add_argument("--sample", action="store_true", help="sample (temperature 1, top-p 0.95, top-k 20)")
    parser.add_argument(
        "--path",
        choices=PATHS,
        default="both",
        help="kernels, plain XLA, or both one after the other; auto and both go without kernels where none can run",
    )
    args = parser.parse_args(argv)
    config = with_layers(MODELS[args.model], args.layers)
    if not 0 <= args.drafts <= len(config.draft_cache_layers):
        parser.error(f"--drafts must be 0..{len(config.draft_cache_layers)} for {args.model}")
    if args.drafts and args.sample:
        parser.error("--sample does not go with --drafts")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("modeling").setLevel(logging.INFO)  # which path it is, and why
    what = dict(model=args.model, format=args.format, context=args.context, batch=args.batch, drafts=args.drafts)
    try:
        result = measure(
            config,
            args.format,
            args.context,
            args.batch,
            args.steps,
            args.repeats,
            drafts=args.drafts,
            path=args.path,
            sampled=args.sample,
        )
    except KernelsError as error:
        parser.error(str(error))
    print(json.dumps(what | dict(sample=args.sample, layers=config.num_hidden_layers) | result))
    for name, value in result.items():
        print(f"{name:>28}  {value}", file=sys.stderr)
    return 0


def measure(
    config: Config,
    weight_format: str,
    context: int,
    batch: int,
    steps: int,
    repeats: int,
    drafts: int = 0,
    path: str = "both",
    sampled: bool = False,
) -> dict:
    """Times decode steps, `repeats` launches of `steps` each, on one of `PATHS` or on both.

    With drafts, a step drafts and checks them all, and keeps one token, as random weights would: divide its time by the
    tokens that a real checkpoint accepts.
    """
    max_len = context + steps * (repeats + 1) + drafts
    model, cache, pages = full_size(config, weight_format, batch, max_len, max_chunk=1, num_drafts=drafts)
    kernels = choose_kernels(model, "auto" if path == "both" else path, batch, jax.devices()[0])
    paths = {"pallas": with_kernels(model, kernels)} if kernels else {}
    if path == "both" or not kernels:
        paths["plain"] = model
    needed, bandwidth = bytes_a_step(model, context, batch, drafts), streaming_read_bandwidth()
    floor = needed / bandwidth * 1e3
    times = {}
    for name, model in paths.items():
        rows = first_rows(config, context, batch, sampled)
        times[name], cache = timed(model, cache, rows, pages, steps, repeats, drafts)
        times[name]["fraction_of_bandwidth"] = round(floor / times[name]["ms_per_step"], 4)
    first, *others = times
    return dict(
        path=first,
        **times[first],
        **{f"{name}_{key}": value for name in others for key, value in times[name].items()},
        bytes_per_token=needed,
        streaming_read_tb_s=round(bandwidth / 1e12, 3),
        floor_ms=round(floor, 4),
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
    )


def timed(model: Model, cache: Cache, rows: Rows, pages: PageTables, steps: int, repeats: int, drafts: int):
    """Times of a step in milliseconds, the kernels it launches and the time to compile it; and the cache."""
    leaves, treedef = jax.tree.flatten(model)
    started = time.perf_counter()
    launch, kernels = compiled_and_counted(decode_launch(treedef, steps, drafts), (1, 2), leaves, cache, rows, pages)
    compile_s = time.perf_counter() - started
    cache, rows = jax.block_until_ready(launch(leaves, cache, rows, pages))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        cache, rows = jax.block_until_ready(launch(leaves, cache, rows, pages))
        times.append((time.perf_counter() - started) / steps * 1e3)
    median = round(statistics.median(times), 4)
    found = dict(ms_per_step=median, ms_per_token=median, ms_min=round(min(times), 4), ms_max=round(max(times), 4))
    return found | dict(kernels_per_step=kernels, compile_s=round(compile_s, 1)), cache


def first_rows(config: Config, context: int, batch: int, sampled: bool) -> Rows:
    """Sequences of `context` tokens; sampled ones at temperature 1, top-p 0.95 and top-k 20, a key each."""
    sampling = None
    if sampled:
        keys = jax.random.key_data(jax.random.split(jax.random.key(3, impl="threefry2x32"), batch))
        sampling = make_sampling_state(batch, config.kept_vocab_size, num_stops=1)._replace(
            temperature=jnp.ones(batch), top_p=jnp.full(batch, 0.95), top_k=jnp.full(batch, 20), key=keys
        )
    rows = Rows(jnp.zeros(batch, jnp.int32), jnp.full(batch, context, jnp.int32), sampling)
    return jax.tree.map(jnp.copy, rows)  # to be donated; several fields of the state start from one array


def decode_launch(treedef: Any, steps: int, drafts: int = 0) -> Callable:
    """What one launch of the host runs: a function (leaves, cache, rows, pages) -> (cache, rows), not jitted.

    Args:
        treedef: of the model, whose leaves the function takes.
    """

    def launch(leaves, cache: Cache, rows: Rows, pages) -> tuple[Cache, Rows]:
        model = jax.tree.unflatten(treedef, leaves)

        def step(_, carry: tuple[Cache, Rows]) -> tuple[Cache, Rows]:
            cache, (tokens, length, sampling) = carry
            batch, chunk = tokens.shape[0], tokens[:, None]
            if drafts:
                assert isinstance(model, Inkling)
                drafted, cache = draft(model, tokens, length, jnp.ones(batch, bool), pages, cache)
                chunk = jnp.concatenate([chunk, drafted], axis=1)
            inputs = Batch(chunk, length, jnp.full(batch, 1 + drafts, jnp.int32), pages)
            hidden, cache = model.forward(inputs, cache)
            if drafts:
                assert isinstance(model, Inkling)
                cache = remember(cache, hidden, model.embedded(chunk), pages.slot, length, inputs.lengths)
            logits = model.logits(hidden[:, 0])
            if sampling is None:
                tokens = jnp.argmax(logits, -1).astype(jnp.int32)
            else:
                tokens = sample(logits, sampling)
                sampling = record(sampling, tokens, jnp.ones(batch, bool))
            return cache, Rows(tokens, length + 1, sampling)

        return lax.fori_loop(0, steps, step, (cache, rows))

    return launch


def compiled_and_counted(function: Callable, donated: tuple[int, ...], *arguments: Any) -> tuple[Callable, int | None]:
    """Compiles for the device at hand; and how many kernels one turn of the function's outermost loop launches.

    XLA says so of programs for a GPU alone, and not of one that comes from the compilation cache.
    """
    lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
    if jax.default_backend() != "gpu":
        return lowered.compile(), None
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        return compiled, kernels_a_turn(Path(folder), f"jit_{function.__name__}")


def kernels_a_turn(folder: Path, module: str) -> int | None:
    """Reads it from what XLA left in a folder for dumps; None if it compiled nothing of that name."""
    dumps = {path.name.split(".", 2)[2]: path for path in folder.glob(f"*.{module}.*.txt")}
    if not dumps:
        print("kernels are not counted: the program came from the compilation cache", file=sys.stderr)
        return None
    # Passes over the thunks leave a second file where they changed anything.
    sequence = dumps.get("thunk_sequence_after_thunk_passes.txt", dumps["thunk_sequence.txt"])
    [hlo] = [path for name, path in dumps.items() if name.endswith("gpu_after_optimizations.txt")]
    thunks = parse(*(path.read_text() for path in (sequence, dumps["thunk_metadata.txt"], hlo)))
    return Report(thunks, code={}, unread=0, ttgir={}, seconds=0.0).body().kernels


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
