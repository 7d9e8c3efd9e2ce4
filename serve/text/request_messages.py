"""The messages and tools of a chat request in one shape, whatever their sender chose among OpenAI's spellings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from serve.request import InvalidRequest

Message = Mapping[str, Any]

DEEPEST = 100  # levels of objects and lists in a request
REASONING_FIELDS = ("reasoning_content", "reasoning")
# The spellings of a part that is a picture or sound, before and after its loading.
MEDIA_TYPES = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
}
_SURROGATE = re.compile("[\ud800-\udfff]")


def check_list(value: Any, name: str, members: str) -> None:
    """Refuses what is no list; the message says what its members should be."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequest(f"{name} must be a list of {members}, not {type(value).__name__}")


def check_tools(tools: Any) -> None:
    """Refuses tools that are no list of objects."""
    check_list(tools, "tools", 'objects such as {"type": "function", "function": {...}}')
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequest('every tool must be an object such as {"type": "function", "function": {...}}')


def check_text(text: str) -> None:
    """Refuses text that cannot be encoded."""
    if found := _SURROGATE.search(text):
        message = f"text holds half of a surrogate pair, U+{ord(found[0]):04X}, which is no character; remove it"
        raise InvalidRequest(message)


def check_depth(depth: int) -> None:
    """Refuses what is nested too deep to be written as JSON."""
    if depth > DEEPEST:
        raise InvalidRequest(f"the messages or tools are nested deeper than {DEEPEST} levels")


def normalised(message: Message, *, join_text: bool) -> dict[str, Any]:
    """A message whose content is a string or a list of parts, and whose calls have objects as arguments.

    Args:
        message: in OpenAI's shape.
        join_text: whether a content of text parts alone becomes one string.

    Raises:
        InvalidRequest: it is malformed.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest("every message must be an object with a role")
    result = dict(message) | {"content": _content(message.get("content"), join_text)}
    if result.get("tool_calls"):
        check_list(result["tool_calls"], "tool_calls", "objects with a function")
        result["tool_calls"] = [_tool_call(call) for call in result["tool_calls"]]
    return result


def has_media(messages: Sequence[Message]) -> bool:
    """Whether a picture or clip is among the parts, loaded or not."""
    return any(_type(part) in MEDIA_TYPES for part in _parts(messages))


def _type(part: Any) -> str | None:
    """The type of a part, where it is a name: JSON may hold a list there."""
    found = part.get("type") if isinstance(part, Mapping) else None
    return found if isinstance(found, str) else None


def _parts(messages: Sequence[Message]) -> Iterator[Any]:
    """The parts of every content that is a list of them."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from content if isinstance(content, list | tuple) else ()


def media_parts(messages: Sequence[Message]) -> list[tuple[str, int]]:
    """(kind, number of tokens) of every loaded picture and clip, in order.

    Raises:
        InvalidRequest: a part's number of tokens is none.
    """
    found = []
    for part in _parts(messages):
        if _type(part) in MEDIA_TYPES and "num_tokens" in part:
            count = part["num_tokens"]
            if type(count) is not int or count < 1:
                raise InvalidRequest(f"a part of type {part['type']} has {count!r} tokens; it must have at least 1")
            found.append((MEDIA_TYPES[part["type"]], count))
    return found


def _content(content: Any, join_text: bool) -> Any:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"a message's content must be a string or a list of parts, not {type(content).__name__}")
    texts = [text for part in content if (text := part if isinstance(part, str) else _part_text(part)) is not None]
    return "".join(texts) if join_text and len(texts) == len(content) else list(content)


def _part_text(part: Any) -> str | None:
    if not isinstance(part, Mapping):
        raise InvalidRequest('a content part must be an object such as {"type": "text", "text": "..."}')
    if part.get("type") != "text":
        return None
    if not isinstance(part.get("text"), str):
        raise InvalidRequest('a content part of type "text" must have a string as its text')
    return part["text"]


def _tool_call(call: Any) -> dict[str, Any]:
    """A call of the history with its arguments as an object."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest("every tool call must be an object with a function and its name")
    function = dict(function) | {"arguments": _arguments(function.get("arguments"), function["name"])}
    return dict(call) | {"function": function} if "function" in call else function


def _arguments(arguments: Any, name: str) -> dict[str, Any]:
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the arguments of the call to {name} are no valid JSON: {error}") from error
    if arguments is None or arguments == "" or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(
            f"the arguments of the call to {name} must be a JSON object, not {type(arguments).__name__}"
        )
    return dict(arguments)
