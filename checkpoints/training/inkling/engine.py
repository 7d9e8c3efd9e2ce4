"""Asks the two embedded checkpoints through the engine, with drafting.

    python -m checkpoints.training.inkling.engine --per-kind 4

Prints how many answers to the examples and to further held-out conversations are right to the last token under greedy
decoding, and how many drafts a step accepts.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from checkpoints.training.inkling.corpus import ALL_KINDS, draw
from checkpoints.training.inkling.examples import line
from checkpoints.training.inkling.export import NVFP4_FOLDER
from checkpoints.training.inkling.render import encode
from checkpoints.training.inkling.tokenizer import CHECKPOINT
from serve.assemble import Assembled, assemble
from serve.chat import encode_prompt
from serve.request import Request, SamplingParams

MOST_TOKENS = 400  # of an answer


def read_examples(folder: Path = CHECKPOINT) -> list[dict[str, Any]]:
    """The lines of examples.jsonl."""
    return [json.loads(entry) for entry in (folder / "examples.jsonl").read_text().splitlines()]


def held_out(per_kind: int, seed: int = 0) -> list[dict[str, Any]]:
    """Held-out conversations of every kind, like lines of examples.jsonl."""
    rng = Random(f"engine-{seed}")
    drawn = [draw(rng, True, kind) for kind in ALL_KINDS for _ in range(per_kind)]
    return [line(conversation.kind, conversation, encode(conversation)) for conversation in drawn]


def answer_of(example: dict[str, Any]) -> dict[str, Any]:
    """The wanted last turn of an example as an assistant message."""
    answer: dict[str, Any] = {"role": "assistant", "content": example["content"]}
    if example["reasoning"]:
        answer["reasoning_content"] = example["reasoning"]
    if example["tool_calls"]:
        answer["tool_calls"] = [{"type": "function", "function": call} for call in example["tool_calls"]]
    return answer


def as_request(assembled: Assembled, name: str, example: dict[str, Any]) -> tuple[Request, tuple[int, ...]]:
    """An example as a greedy request, and the tokens that it must be answered with."""
    options = {"reasoning_effort": example["reasoning_effort"]}
    tools = example.get("tools")
    prompt, media = encode_prompt(assembled, example["messages"], tools, **options)
    messages = [*example["messages"], answer_of(example)]
    whole, _ = encode_prompt(assembled, messages, tools, add_generation_prompt=False, **options)
    sampling = SamplingParams(temperature=0, max_tokens=MOST_TOKENS)
    return Request(name, tuple(prompt), sampling, media), tuple(whole[len(prompt) :])


def ask(assembled: Assembled, examples: Sequence[dict[str, Any]]) -> tuple[list[bool], list[tuple[int, ...]]]:
    """Whether each answer is right to the last token, and what each request's drafts did: steps, then accepted ones by
    depth. The engine must have been started."""
    pairs = [as_request(assembled, str(i), example) for i, example in enumerate(examples)]
    right = [False] * len(pairs)
    counts: list[tuple[int, ...]] = [()] * len(pairs)
    for done in assembled.engine.generate(request for request, _ in pairs):
        i = int(done.request_id)
        right[i] = done.token_ids == pairs[i][1]
        counts[i] = (done.speculation.num_steps, *done.speculation.accepted_by_depth)
    return right, counts


def report(name: str, examples: Sequence[dict[str, Any]], right: list[bool], counts: list[tuple[int, ...]]) -> None:
    """Prints totals, and the kinds with wrong answers."""
    wrong: dict[str, int] = defaultdict(int)
    for example, good in zip(examples, right, strict=True):
        wrong[example["kind"]] += not good
    depths = max(map(len, counts))
    total = np.array([np.pad(count, (0, depths - len(count))) for count in counts]).sum(0)
    accepted = total[1:] / max(1, total[0])
    print(f"{name}: {sum(right)} of {len(right)} right; a step accepts {accepted.sum():.2f} drafts, by depth "
          f"{' '.join(f'{share:.2f}' for share in accepted)}; wrong: "
          f"{', '.join(f'{kind} {count}' for kind, count in wrong.items() if count) or 'none'}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-kind", type=int, default=4)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--drafts", type=int, help="tokens to draft a step; as many as the engine likes if left out")
    args = parser.parse_args()
    sets = {"held out": held_out(args.per_kind)}
    if (CHECKPOINT / "examples.jsonl").exists():
        sets = {"examples": read_examples()} | sets
    for folder in (CHECKPOINT, NVFP4_FOLDER):
        assembled = assemble(str(folder), dtype=args.dtype, num_draft_tokens=args.drafts)
        assembled.engine.start()
        for name, examples in sets.items():
            report(f"{folder.name}, {name}", examples, *ask(assembled, examples))
        assembled.engine.close()


if __name__ == "__main__":
    main()
