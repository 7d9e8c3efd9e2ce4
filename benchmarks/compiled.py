"""What a full-size step is compiled to, on a machine without a GPU: `python -m benchmarks.compiled --format nvfp4`.

Compiles the step that `benchmarks.decode` or `benchmarks.prefill` times, from shapes alone, and counts what one step
launches: of decode one turn of the loop over tokens, of prefill one chunk. Prints one JSON line, then a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.decode import decode_launch, first_rows
from benchmarks.full_size import MODELS, abstract_model, with_layers
from benchmarks.prefill import prefill_step
from modeling.architecture import Model
from modeling.cache import CacheShape, consecutive_pages, make_cache
from modeling.kernels import REQUESTS, KernelsError, choose_kernels, with_kernels
from pallas_kernels.deviceless import TARGETS, Report, compile_for

STEPS = 16  # tokens a launch, as in benchmarks.decode


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="flint")
    parser.add_argument("--format", choices=["nvfp4", "bf16"], default="nvfp4")
    parser.add_argument("--phase", choices=["decode", "prefill"], default="decode")
    parser.add_argument("--target", choices=sorted(TARGETS), default="h200")
    parser.add_argument("--batch", type=int, default=1, help="sequences that decode together; prefill takes one")
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache of each sequence")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens a prefill step")
    parser.add_argument("--drafts", type=int, default=0, help="tokens drafted and checked a step, for models that can")
    parser.add_argument("--path", choices=REQUESTS, default="auto", help="of decode: kernels or plain XLA")
    parser.add_argument("--sample", action="store_true", help="decode samples (temperature 1, top-p 0.95, top-k 20)")
    parser.add_argument("--layers", type=int, help="only this many layers")
    args = parser.parse_args(argv)
    config = with_layers(MODELS[args.model], args.layers)
    if not 0 <= args.drafts <= len(config.draft_cache_layers):
        parser.error(f"--drafts must be 0..{len(config.draft_cache_layers)} for {args.model}")
    jax.config.update("jax_platforms", "cpu")  # where there is a GPU, it is left alone
    model = abstract_model(config, args.format, args.drafts)
    if args.phase == "prefill":
        if args.batch != 1 or args.drafts:
            parser.error("--phase prefill takes --batch 1 and no --drafts")
        path = "plain"
        report = compile_for(args.target, *prefill_chunk(model, args.context, args.chunk), donate=1)
    else:
        try:
            kernels = choose_kernels(model, args.path, args.batch, device=None)
        except KernelsError as error:
            parser.error(str(error))
        path = "pallas" if kernels else "plain"
        launch = decode_launch_of(with_kernels(model, kernels), args.context, args.batch, args.drafts, args.sample)
        report = compile_for(args.target, *launch, donate=(1, 2)).body()
    what = {name: getattr(args, name) for name in ("model", "format", "phase", "target", "batch", "context", "sample")}
    what |= dict(path=path, layers=config.num_hidden_layers, drafts=args.drafts)
    print(json.dumps(what | counts(report)))
    print_table(report)
    return 0


def decode_launch_of(
    model: Model, context: int, batch: int, drafts: int, sampled: bool
) -> tuple[Callable, Any, Any, Any, Any]:
    """The launch that `benchmarks.decode` times, and shapes of its arguments."""
    leaves, treedef = jax.tree.flatten(model)
    shape = CacheShape.for_sequences(model.config, batch, context + STEPS + drafts, 1, drafts)
    cache = jax.eval_shape(lambda: make_cache(model.config, shape, model.dtype))
    rows = jax.eval_shape(lambda: first_rows(model.config, context, batch, sampled))
    return decode_launch(treedef, STEPS, drafts), leaves, cache, rows, consecutive_pages(shape)


def prefill_chunk(model: Model, context: int, chunk: int) -> tuple[Callable, Any, Any, Any, Any, Any]:
    """The step that `benchmarks.prefill` times, and shapes of its arguments."""
    leaves, treedef = jax.tree.flatten(model)
    shape = CacheShape.for_sequences(model.config, 1, context + chunk, chunk)
    cache = jax.eval_shape(lambda: make_cache(model.config, shape, model.dtype))
    ids, start = (jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((1, chunk), (1,)))
    return prefill_step(treedef), leaves, cache, ids, start, consecutive_pages(shape)


def counts(report: Report) -> dict:
    """What one step launches. Spills are bytes a thread, summed over kernels; of a loop, how often it runs."""
    return dict(
        kernels=report.kernels,
        copies=report.copies,
        command_buffers=report.command_buffers,
        uncaptured=report.uncaptured.total(),
        spills=report.spills,
        local_memory=report.local_memory,
        registers_max=report.registers_max,
        kinds=dict(report.kinds.most_common()),
        uncaptured_kinds=dict(report.uncaptured.most_common()),
        loops=[loop.trips for loop in report.loops],
        seconds=round(report.seconds, 1),
        jax=jax.__version__,
    )


def print_table(report: Report) -> None:
    """The counts, then the kernels that are launched most or take local memory."""
    for name, value in counts(report).items():
        print(f"{name:>24}  {value}", file=sys.stderr)
    print(f"\n{'launches':>8} {'registers':>9} {'spills':>6} {'local':>5}  kernel", file=sys.stderr)
    ranked = report.names.most_common()
    for name, launches in ranked[:20] + [(name, n) for name, n in ranked[20:] if report.code[name].local]:
        code = report.code[name]
        print(f"{launches:>8} {code.registers:>9} {code.spills:>6} {code.local:>5}  {name}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
