"""The tiny Inkling's corpus: the tiny Flint's kinds of text, at every effort, and conversations with media."""

import dataclasses
from collections.abc import Iterator
from random import Random
from typing import Any

from checkpoints.training import corpus as flint
from checkpoints.training.conversation import Conversation
from checkpoints.training.corpus import draw_turn, held_out, pick_kind, sloppy
from checkpoints.training.inkling.sights import MEDIA_KINDS, media_conversation
from checkpoints.training.needles import needle
from checkpoints.training.questions import KINDS
from checkpoints.training.tools import declare_known, invent, tool_call, tool_response

LONGEST_NEEDLE = 40  # sentences, about 700 tokens
EFFORTS = ("high", "high", "high", "high", "medium", "low", "minimal", "xhigh")  # that think; "none" does not
MIX = {
    "short": 0.36, "multi_turn": 0.08, "memory": 0.03, "needle": 0.08, "tool_call": 0.12, "tool_response": 0.07,
    "picture": 0.13, "tone": 0.08, "picture_and_tone": 0.05,
}  # fmt: skip
ALL_KINDS = (*KINDS, *(name for name in MIX if name != "short"))


@dataclasses.dataclass
class Asked(Conversation):
    """A conversation with an effort, which decides whether the model thinks."""

    effort: str = "high"

    def as_json(self) -> dict[str, Any]:
        """One line of examples.jsonl, without its media."""
        line = super().as_json()
        del line["enable_thinking"]
        return line | {"reasoning_effort": self.effort}

    def answer(self) -> dict[str, Any]:
        """The wanted last turn as an assistant message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.enable_thinking:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in self.tool_calls
            ]
        return message


def asked(rng: Random, conversation: Conversation) -> Asked:
    """With an effort that fits, and as Inkling instead of Flint."""
    fields = {field.name: getattr(conversation, field.name) for field in dataclasses.fields(Conversation)}
    effort = rng.choice(EFFORTS) if conversation.enable_thinking else "none"
    return Asked(**_renamed(fields), effort=effort)


def _renamed(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("Flint", "Inkling")
    if isinstance(value, dict):
        return {key: _renamed(item) for key, item in value.items()}
    return [_renamed(item) for item in value] if isinstance(value, list) else value


def short(rng: Random, held: bool = False, name: str | None = None) -> Conversation:
    """One short question, at times under a system prompt or with tools that it does not need."""
    name = name or pick_kind(rng)
    turn = draw_turn(rng, name, held)
    messages = [{"role": "user", "content": sloppy(rng, turn, name)}]
    system = turn.system or (rng.choice(flint.SYSTEM) if rng.random() < 0.2 else None)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    tools = None
    if rng.random() < 0.05:
        tools = [declare_known(rng, rng.choice(("get_weather", "set_alarm", "send_message", "get_time")))]
        tools += [invent(rng)[0]] if rng.random() < 0.3 else []
    return Conversation(name, messages, turn.answer, turn.reasoning, tools, enable_thinking=rng.random() < 0.7)


def multi_turn(rng: Random, held: bool = False) -> Conversation:
    """Several short questions in a row, their thinking kept or not; only the last one is held out."""
    last = short(rng, held)
    while last.tools or last.kind == "identity":
        last = short(rng, held)
    system = [m for m in last.messages if m["role"] == "system"]
    keeps, messages = last.enable_thinking and rng.random() < 0.5, []
    for _ in range(rng.randint(1, 3)):
        turn = draw_turn(rng, pick_kind(rng), False)
        if turn.system is None:
            reply = {"role": "assistant", "content": turn.answer}
            messages += [
                {"role": "user", "content": turn.question},
                reply | ({"reasoning_content": turn.reasoning} if keeps else {}),
            ]
    last.messages = [*system, *messages, last.messages[-1]]
    last.kind = "multi_turn"
    return last


LONG = {"needle": lambda rng: needle(rng, LONGEST_NEEDLE), "tool_call": tool_call, "tool_response": tool_response}


def draw(rng: Random, held: bool = False, kind: str | None = None) -> Asked:
    """A conversation of the mix, or of one kind."""
    if kind is None:
        kind = rng.choices(list(MIX), list(MIX.values()))[0]
    if kind in MEDIA_KINDS:
        return asked(rng, media_conversation(rng, held, kind))
    if kind in LONG:
        while True:
            conversation = LONG[kind](rng)
            question = next(m["content"] for m in conversation.messages if m["role"] != "system" or kind == "needle")
            if held_out(question) == held:
                return asked(rng, conversation)
    if kind == "multi_turn":
        return asked(rng, multi_turn(rng, held))
    if kind == "memory":
        return asked(rng, flint.memory(rng, held))
    return asked(rng, short(rng, held, None if kind == "short" else kind))


def stream(seed: int, held: bool = False) -> Iterator[Asked]:
    """Conversations without end, the same ones for the same seed."""
    rng = Random(seed)
    while True:
        yield draw(rng, held)
