"""Inkling's chat format, written out: messages to control tokens and text, token for token (spec 8.2 to 8.6).

For checkpoints without a chat template of their own. Where public renderers differ, this one does as the model's own
renderer, but for the generation prompt, which vLLM and the released template append:

* One message a content part. A content that is empty gives an empty message, in an assistant's turn only if the turn
  has nothing else. Empty text beside calls is left out.
* Tools are declared behind the leading system messages, and the effort stands behind them (vLLM puts tools first).
* Effort zero is written `0` (vLLM: `0.0`).
* The `name` of a user, system or assistant message is not shown to the model; no public renderer of chats shows it.
* Keys of arguments are sorted at every level, as in vLLM and the specification; the model's own renderer sorts the
  outermost only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from serve.request import InvalidRequest
from serve.text import inkling_tokens as tokens
from serve.text.request_messages import (
    DEEPEST,
    MEDIA_TYPES,
    REASONING_FIELDS,
    Message,
    check_text,
    check_tools,
    normalised,
)
from serve.text.tool_choice import function_of, tool_schemas

EFFORTS = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "xhigh": 0.99, "max": 0.99}
DEFAULT_EFFORT = "high"
_MOST_EFFORT = 0.99
_NUMBER = re.compile(r"0(\.[0-9]{1,2})?")  # the gateway hands on numbers as text

_ROLES = {
    "system": tokens.SYSTEM,
    "developer": tokens.SYSTEM,
    "user": tokens.USER,
    "assistant": tokens.MODEL,
    "tool": tokens.TOOL,
}


class Marker(str):
    """A control token, by its name; any other string is ordinary text."""


def render(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    effort: str | float | None = None,
    add_generation_prompt: bool = True,
) -> Iterator[str]:
    """The prompt as control tokens (`Marker`) and text in turn.

    Args:
        messages: in OpenAI's shape. A picture or clip is {"type": "image" or "audio", "num_tokens": N}; a part of type
            "thinking" is an assistant's reasoning at its own place; `is_error` marks a tool's result as an error.
        tools: in OpenAI's shape, or None.
        effort: a name of `EFFORTS`, or a number; None means the default.
        add_generation_prompt: end with the beginning of the assistant's turn.

    Raises:
        InvalidRequest: a message, a tool or the effort is malformed.
    """
    messages = [normalised(message, join_text=False) for message in messages]
    after_system = next((i for i, m in enumerate(messages) if _ROLES.get(m["role"]) != tokens.SYSTEM), len(messages))
    call_names: dict[str, str] = {}
    for message in messages[:after_system]:
        yield from _message(message, call_names)
    if tools:
        yield from _framed(tokens.SYSTEM, tokens.XML, _declaration(tools), "tool_declare")
    yield from _framed(tokens.SYSTEM, tokens.TEXT, f"Thinking effort level: {effort_text(effort)}")
    for message in messages[after_system:]:
        yield from _message(message, call_names)
    if add_generation_prompt:
        yield Marker(tokens.MODEL)


def effort_text(effort: str | float | None) -> str:
    """An effort as the model reads it: at most two decimals, without trailing zeros (spec 8.3).

    Raises:
        InvalidRequest: it is no known name, nor a number from 0 to 0.99.
    """
    value = DEFAULT_EFFORT if effort is None else effort
    if isinstance(value, str):
        value = float(value) if _NUMBER.fullmatch(value) else EFFORTS.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_EFFORT:
        names = ", ".join(EFFORTS)
        raise InvalidRequest(
            f"reasoning_effort {effort!r} is unknown: use {names}, or a number from 0 to {_MOST_EFFORT}"
        )
    # As the model's renderer: to thousandths, and these, in double precision, to hundredths, a half to the even one.
    hundredths = round(round(value * 1000) / 1000 * 100)
    return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".")


def _message(message: dict[str, Any], call_names: dict[str, str]) -> Iterator[str]:
    role = message["role"]
    if role not in _ROLES:
        raise InvalidRequest(f"role {role!r} is unknown: use {', '.join(_ROLES)}")
    if role == "assistant":
        yield from _assistant_turn(message, call_names)
        return
    author, text_kind = "", tokens.TEXT
    if role == "tool":
        author = message.get("name") or call_names.get(str(message.get("tool_call_id")), "")
        text_kind = tokens.TOOL_ERROR if message.get("is_error") else tokens.TEXT
    for kind, payload in _parts(message["content"]):
        yield from _framed(_ROLES[role], text_kind if kind == tokens.TEXT else kind, payload, str(author))


def _assistant_turn(message: dict[str, Any], call_names: dict[str, str]) -> Iterator[str]:
    reasoning = next((message[field] for field in REASONING_FIELDS if message.get(field)), "")
    if not isinstance(reasoning, str):
        raise InvalidRequest("an assistant message's reasoning must be a string")
    calls = message.get("tool_calls") or []
    parts = [(tokens.THINKING, reasoning)] if reasoning else []
    if message["content"] != "" or not (reasoning or calls):
        parts += [part for part in _parts(message["content"]) if part != (tokens.TEXT, "") or not calls]
    for kind, payload in parts:
        yield from _framed(tokens.MODEL, kind, payload)
    for call in calls:
        function = function_of(call)
        if isinstance(call.get("id"), str):
            call_names[call["id"]] = function["name"]
        payload = f'{{"name":{canonical_json(function["name"])},"args":{canonical_json(function["arguments"])}}}'
        yield from _framed(tokens.MODEL, tokens.CALL, payload, function["name"])
    yield Marker(tokens.END_TURN)


def _parts(content: str | list[Any]) -> Iterator[tuple[str, str | int]]:
    """(kind, text or number of placeholders) of every part."""
    if isinstance(content, str):
        yield tokens.TEXT, content
        return
    for part in content:
        if isinstance(part, str):
            yield tokens.TEXT, part
            continue
        kind = part.get("type")
        if kind == "text":
            yield tokens.TEXT, part["text"]
        elif kind == "thinking" and isinstance(part.get("thinking"), str):
            yield tokens.THINKING, part["thinking"]
        elif kind in MEDIA_TYPES and "num_tokens" in part:
            yield tokens.IMAGE if MEDIA_TYPES[kind] == "image" else tokens.AUDIO, part["num_tokens"]
        else:
            raise InvalidRequest(f"a content part of type {kind!r} cannot be rendered: use text, images or audio")


def _framed(role: str, kind: str, payload: str | int, author: str = "") -> Iterator[str]:
    """One message: text, or that many placeholders."""
    yield Marker(role)
    if author:
        check_text(author)
        yield author
    yield Marker(kind)
    if isinstance(payload, int):
        yield from [Marker(tokens.PLACEHOLDERS["image" if kind == tokens.IMAGE else "audio"])] * payload
        if kind == tokens.AUDIO:
            yield Marker(tokens.AUDIO_END)
    elif payload:
        check_text(payload)
        yield payload
    yield Marker(tokens.END_MESSAGE)


def _declaration(tools: Sequence[Mapping[str, Any]]) -> str:
    check_tools(tools)
    tool_schemas(tools)  # every tool has a name
    declared = []
    for tool in tools:
        function = function_of(tool)
        declared.append(
            {
                "description": function.get("description") or "",
                "name": function["name"],
                "parameters": function.get("parameters") or {},
                "type": tool.get("type") or "function",
            }
        )
    return canonical_json(declared)


def canonical_json(value: Any) -> str:
    """JSON without spaces, keys sorted at every level, characters beyond ASCII kept.

    Raises:
        InvalidRequest: it holds what JSON has no words for, or is nested too deep.
    """
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise InvalidRequest(f"the messages or tools are nested deeper than {DEEPEST} levels") from None
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"tools and arguments must be JSON: {error}") from error
