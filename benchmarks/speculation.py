"""Prefill and decode rates of a checkpoint in the engine, with and without drafts:
`python -m benchmarks.speculation --model checkpoints/inkling-tiny`.

Greedy answers to chat prompts, all at once, for each draft length; the answers must not differ. Prints one JSON line,
then a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("--model", default="checkpoints/inkling-tiny", help="folder or hub repository id")
    parser.add_argument("--prompts", type=Path, help="JSONL of {messages: [...]} (default: the model's examples.jsonl)")
    parser.add_argument("--drafts", type=int, nargs="+", help="draft lengths (default: 0 and the engine's own)")
    parser.add_argument("--requests", type=int, default=32, help="most prompts")
    parser.add_argument("--num-slots", type=int, default=1, help="sequences at once")
    parser.add_argument("--max-tokens", type=int, default=200, help="most tokens an answer")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs over all prompts")
    args = parser.parse_args(argv)
    file = args.prompts or Path(args.model) / "examples.jsonl"
    if not file.is_file():
        parser.error(f"{file} does not exist; name a JSONL file of chat prompts with --prompts")
    conversations = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    texts = [messages for messages in conversations if all(isinstance(m.get("content"), str) for m in messages)]
    rows, answers = [], []
    for num_drafts in args.drafts or (0, None):
        row, tokens = measure(args, num_drafts, texts[: args.requests])
        rows.append(row)
        answers.append(tokens)
    differ = sum(a != b for others in answers[1:] for a, b in zip(answers[0], others, strict=True))
    print(json.dumps(dict(model=args.model, num_slots=args.num_slots, runs=rows, answers_that_differ=differ)))
    for name in rows[0]:
        print(f"{name:>24}  " + "  ".join(f"{row[name]!s:>12}" for row in rows), file=sys.stderr)
    return 0


def measure(args: argparse.Namespace, num_drafts: int | None, texts: list) -> tuple[dict[str, Any], list]:
    """Rates with one draft length, and the answers' tokens."""
    import jax

    from serve.assemble import assemble
    from serve.chat import encode_prompt
    from serve.request import Request, SamplingParams

    assembled = assemble(
        args.model, dtype=args.dtype, text_only=True, num_slots=args.num_slots, num_draft_tokens=num_drafts
    )
    prompts = [encode_prompt(assembled, messages)[0] for messages in texts]
    with assembled.engine as engine:

        def run(max_tokens: int) -> tuple[float, list]:
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            work = [Request(str(i), tuple(prompt), sampling) for i, prompt in enumerate(prompts)]
            started = time.perf_counter()
            done = {one.request_id: one for one in engine.generate(work)}
            return time.perf_counter() - started, [done[str(i)] for i in range(len(work))]

        run(args.max_tokens)
        # One token an answer is the prompts' share; the rest of a whole run is decoding.
        prefill = statistics.median(run(1)[0] for _ in range(args.repeats))
        whole = [run(args.max_tokens) for _ in range(args.repeats)]
    seconds, answers = statistics.median(time_s for time_s, _ in whole), whole[0][1]
    generated = sum(len(one.token_ids) - 1 for one in answers)
    steps = sum(one.speculation.num_steps for one in answers)
    return dict(
        num_draft_tokens=engine.num_draft_tokens,
        prompt_tokens_per_s=round(sum(map(len, prompts)) / prefill, 1),
        decode_tokens_per_s=round(generated / max(seconds - prefill, 1e-9), 1),
        tokens_per_step=round(generated / max(steps, 1), 3),
        accepted_by_depth=_shares([one.speculation.accepted_by_depth for one in answers], steps),
        prompt_tokens=sum(map(len, prompts)),
        decode_tokens=generated,
        device=jax.devices()[0].device_kind,
    ), [one.token_ids for one in answers]


def _shares(counts: list[tuple[int, ...]], steps: int) -> list[float]:
    """Of all steps, how many accepted the first draft, the second and so on."""
    depths = max(map(len, counts), default=0)
    return [round(sum(c[d] for c in counts if d < len(c)) / max(steps, 1), 3) for d in range(depths)]


if __name__ == "__main__":
    sys.exit(main())
