"""Picks the held-out conversations of `inkling-tiny/examples.jsonl`, which both checkpoints answer exactly.

    python -m checkpoints.training.inkling.examples

A conversation is taken if each token of its answer has at least 90% in both formats, so that no backend's rounding
changes what greedy decoding gives; a kind in which fifty candidates have none is left out, and named. Pictures are PNG
and tones WAV files, in the parts that chat clients send.
"""

import base64
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.training.inkling.corpus import Asked, draw
from checkpoints.training.inkling.export import NVFP4_FOLDER, Arrays, read
from checkpoints.training.inkling.forward import forward, logits_of
from checkpoints.training.inkling.pack import pack
from checkpoints.training.inkling.pictures import png
from checkpoints.training.inkling.render import Encoded, encode
from checkpoints.training.inkling.shape import config as make_config
from checkpoints.training.inkling.tokenizer import CHECKPOINT
from checkpoints.training.inkling.tones import wav
from checkpoints.training.inkling.train import rows_of
from checkpoints.training.questions import KINDS

SURE = 0.9
MOST_CANDIDATES = 50  # for a line of the list
LENGTHS = (128, 384, 1024)


def confidence(params: Arrays) -> Callable[[Encoded], float]:
    """A function that gives the lowest probability of an answer's tokens."""
    config, weights = make_config(), {name: jnp.asarray(value) for name, value in params.items()}

    @jax.jit
    def chosen(rows):
        logits = logits_of(weights, forward(weights, rows, config).hidden[0], config)[:, :-1]
        return jnp.take_along_axis(jax.nn.softmax(logits, -1), rows.tokens[:, 1:, None].astype(jnp.int32), -1)[0, :, 0]

    def lowest(item: Encoded) -> float:
        size = next(size for size in LENGTHS if size >= len(item.ids))
        packed, left = pack([("", item)], 2, size)
        if left:
            return 0.0
        return float(chosen(rows_of(packed))[item.start - 1 : len(item.ids) - 1].min())

    return lowest


def wishes() -> Iterator[tuple[str, Callable[[Random], Asked]]]:
    """What the list holds: a label and how to draw a candidate, one for each line."""

    def of(kind: str, accept: Callable[[Asked], bool] = lambda c: True) -> Callable[[Random], Asked]:
        def candidate(rng: Random) -> Asked:
            while not accept(conversation := draw(rng, True, kind)):
                pass
            return conversation

        return candidate

    for i, kind in enumerate(KINDS):
        off = i % 5 == 4
        yield kind, of(kind, lambda c, off=off: c.enable_thinking != off and c.tools is None)
    for i in range(8):
        yield "picture", of("picture", lambda c, off=i % 4 == 3: c.enable_thinking != off and len(c.messages) == 1)
        yield "tone", of("tone", lambda c, off=i % 4 == 3: c.enable_thinking != off and len(c.messages) == 1)
    for turns in (1, 1, 3, 3):
        yield "picture_and_tone", of("picture_and_tone", lambda c, turns=turns: len(c.messages) == turns)
    yield "picture, asked again", of("picture", lambda c: len(c.messages) > 2)
    yield "tone, asked again", of("tone", lambda c: len(c.messages) > 2)
    for tokens in (150, 300, 450):
        yield f"needle {tokens}", of("needle", lambda c, n=tokens: n <= len(encode(c).ids) < n + 100)
    for want in (str, int, bool, float):
        yield f"tool_call {want.__name__}", of("tool_call", lambda c, t=want: any(type(v) is t for v in _values(c)))
    yield "tool_call two calls", of("tool_call", lambda c: len(c.tool_calls) == 2)
    yield "tool_call thinking off", of("tool_call", lambda c: not c.enable_thinking)
    for off in (False, False, True):
        yield "tool_response", of("tool_response", lambda c, off=off: c.enable_thinking != off)
        yield "multi_turn", of("multi_turn", lambda c, off=off: c.enable_thinking != off)
    yield "memory", of("memory")
    yield "memory", of("memory", lambda c: len(c.messages) > 4)
    yield "tools not needed", of("short", lambda c: c.tools is not None)


def _values(conversation: Asked) -> list:
    return [value for _, arguments in conversation.tool_calls for value in arguments.values()]


def as_sent(part: dict[str, Any]) -> dict[str, Any]:
    """A content part as a chat client sends it."""
    if part["type"] == "text":
        return part
    if part["type"] == "image":
        url = f"data:image/png;base64,{base64.b64encode(png(part['image'])).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}
    data = base64.b64encode(wav(part["audio"])).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def line(label: str, conversation: Asked, item: Encoded) -> dict[str, Any]:
    """One line of the list."""
    messages = [
        {**m, "content": [as_sent(part) for part in m["content"]]} if isinstance(m.get("content"), list) else m
        for m in conversation.messages
    ]
    counts = {"prompt_tokens": item.start, "output_tokens": len(item.ids) - item.start}
    return conversation.as_json() | {"kind": label, "messages": messages} | counts


def main() -> None:
    sure = [confidence(read(CHECKPOINT)), confidence(read(NVFP4_FOLDER))]
    rng, lines, drawn, missing = Random("examples"), [], 0, []
    for label, candidate in wishes():
        for _ in range(MOST_CANDIDATES):
            conversation = candidate(rng)
            item = encode(conversation)
            drawn += 1
            if all(lowest(item) >= SURE for lowest in sure):
                lines.append(line(label, conversation, item))
                break
        else:
            missing.append(label)
    text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in lines)
    (CHECKPOINT / "examples.jsonl").write_text(text)
    print(f"{len(lines)} conversations of {drawn} drawn; without a sure answer: {', '.join(missing) or 'none'}")


if __name__ == "__main__":
    main()
