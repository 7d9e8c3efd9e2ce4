"""Picks the held-out conversations of `flint-tiny/examples.jsonl`, which both checkpoints answer exactly.

    python -m checkpoints.training.examples

Every kind is drawn until the wanted number of conversations is found in which each token of the answer has at least
90% in both formats, so that no backend's rounding changes what greedy decoding gives.
"""

import json
from collections.abc import Callable, Iterator
from random import Random

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.training.conversation import Conversation
from checkpoints.training.corpus import draw, held_out
from checkpoints.training.export import NVFP4_FOLDER, Arrays, read_gguf, read_safetensors
from checkpoints.training.forward import forward
from checkpoints.training.needles import needle
from checkpoints.training.questions import KINDS
from checkpoints.training.render import encode
from checkpoints.training.shape import config as make_config
from checkpoints.training.tokenizer import CHECKPOINT

SURE = 0.9
WINDOW = make_config().sliding_window or 0
FAR = 5 * WINDOW  # tokens between a needle and the question


def confidence(params: Arrays) -> Callable[[Conversation], float]:
    """A function that gives the lowest probability of an answer's tokens."""
    config, weights = make_config(), {name: jnp.asarray(value) for name, value in params.items()}

    @jax.jit
    def chosen(tokens: jax.Array) -> jax.Array:
        logits = forward(weights, tokens, jnp.ones_like(tokens), config)[0][:, :-1]
        return jnp.take_along_axis(jax.nn.softmax(logits, -1), tokens[:, 1:, None], -1)[0, :, 0]

    def lowest(conversation: Conversation) -> float:
        ids, _, start = encode(conversation)
        size = next(size for size in (64, 256, 1024) if size >= len(ids))
        tokens = np.pad(ids, (0, size - len(ids))).astype(np.int32)
        return float(chosen(tokens[None])[start - 1 : len(ids) - 1].min())

    return lowest


def far_needle(rng: Random, tokens: int) -> Conversation:
    """A held-out needle in about `tokens` tokens of text, at least `FAR` tokens before its question."""
    while True:
        sentences = tokens // 18
        conversation = needle(rng, sentences, sentences)
        fact = conversation.reasoning
        place = next((m["content"] for m in conversation.messages if fact in m["content"]), "")
        after = "".join(m["content"] for m in conversation.messages)
        after = after[after.index(fact) :] if place else ""
        if held_out(place) and len(after.split()) > FAR // 2 + WINDOW and len(conversation.messages) <= 3:
            return conversation


def wishes() -> Iterator[tuple[str, Callable[[Random], Conversation]]]:
    """What the list holds: a label and how to draw a candidate, one for each line."""

    def of(kind: str, accept: Callable[[Conversation], bool] = lambda c: True) -> Callable[[Random], Conversation]:
        def candidate(rng: Random) -> Conversation:
            while not accept(conversation := draw(rng, True, kind)):
                pass
            return conversation

        return candidate

    for i, kind in enumerate(KINDS):
        off = i % 5 == 4
        yield kind, of(kind, lambda c, off=off: c.enable_thinking != off and c.tools is None)
    for tokens in (200, 200, 400, 600, 600, 850):
        yield f"needle {tokens}", lambda rng, tokens=tokens: far_needle(rng, tokens)
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


def _values(conversation: Conversation) -> list:
    return [value for _, arguments in conversation.tool_calls for value in arguments.values()]


def main() -> None:
    sure = [confidence(read_safetensors(CHECKPOINT)), confidence(read_gguf(NVFP4_FOLDER))]
    rng, lines, drawn = Random("examples"), [], 0
    for label, candidate in wishes():
        while True:
            conversation = candidate(rng)
            drawn += 1
            if all(lowest(conversation) >= SURE for lowest in sure):
                break
        ids, _, start = encode(conversation)
        lines.append(
            conversation.as_json() | {"kind": label, "prompt_tokens": start, "output_tokens": len(ids) - start}
        )
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (CHECKPOINT / "examples.jsonl").write_text(text)
    print(f"{len(lines)} conversations of {drawn} drawn")


if __name__ == "__main__":
    main()
