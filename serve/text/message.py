"""What an answer consists of once it has been parsed: reasoning, content and tool calls, in parts or whole."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class ToolCallDelta:
    """News of one tool call.

    Attributes:
        index: which call of the answer, from 0.
        id, name: on the first delta of a call, else None.
        arguments: a part of the arguments; the parts of one call, joined, are one JSON object.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclasses.dataclass(frozen=True)
class Delta:
    """A further part of an answer: some reasoning, or some content, or some tool calls; never two of them."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A whole tool call; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class ParsedMessage:
    """A whole answer. Empty strings where the model wrote nothing.

    Attributes:
        choice_honoured: False if the request demanded a tool call (`tool_choice` required, or a named tool) and the
            answer makes none. The caller then has to report that; the answer must not pass for a normal one.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    choice_honoured: bool = True


def new_call_id() -> str:
    """A fresh id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """Joins neighbours of one kind."""
    merged: list[Delta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if last and delta.reasoning and last.reasoning:
            merged[-1] = Delta(reasoning=last.reasoning + delta.reasoning)
        elif last and delta.content and last.content:
            merged[-1] = Delta(content=last.content + delta.content)
        elif last and delta.tool_calls and last.tool_calls:
            merged[-1] = Delta(tool_calls=last.tool_calls + delta.tool_calls)
        else:
            merged.append(delta)
    return merged


def collect(deltas: Iterable[Delta], choice_honoured: bool = True) -> ParsedMessage:
    """The whole answer that a stream of deltas amounts to.

    Content beside tool calls is stripped on both sides. A stream cannot do that, since it does not know whether a call
    will follow; that is the one difference between an answer sent whole and the same answer streamed.
    """
    deltas = list(deltas)
    parts: dict[int, list[ToolCallDelta]] = {}
    for part in (part for delta in deltas for part in delta.tool_calls):
        parts.setdefault(part.index, []).append(part)
    calls = tuple(
        ToolCall(of_call[0].id or "", of_call[0].name or "", "".join(part.arguments for part in of_call))
        for _, of_call in sorted(parts.items())
    )
    content = "".join(delta.content for delta in deltas)
    return ParsedMessage(
        reasoning="".join(delta.reasoning for delta in deltas),
        content=content.strip() if calls else content,
        tool_calls=calls,
        choice_honoured=choice_honoured,
    )
