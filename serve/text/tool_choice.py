"""Which tools an answer may call: what `tools` and `tool_choice` of a request come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve.request import InvalidRequest


def tool_schemas(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any] | None]:
    """Tool name -> JSON schema of its parameters.

    Raises:
        InvalidRequest: a tool is no function with a name.
    """
    functions = [function_of(tool) for tool in tools or ()]
    if not all(isinstance(function.get("name"), str) for function in functions):
        raise InvalidRequest(
            'every tool must be a function with a name: {"type": "function", "function": {"name": ...}}'
        )
    return {function["name"]: function.get("parameters") for function in functions}


def function_of(outer: Any) -> Mapping[str, Any]:
    """What a tool or choice says about its function, nested as in OpenAI's chat API or flat as in its responses API."""
    inner = outer.get("function", outer) if isinstance(outer, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def allowed_names(schemas: Mapping[str, Any], tool_choice: str | Mapping[str, Any]) -> set[str] | None:
    """The names that may be called; None for any.

    Raises:
        InvalidRequest: the choice demands what the tools cannot give, or is of an unknown form.
    """
    if tool_choice == "none":
        return set()
    if tool_choice == "auto":
        return set(schemas) or None
    if tool_choice == "required":
        if not schemas:
            raise InvalidRequest('tool_choice "required" needs tools: list at least one, or use "auto"')
        return set(schemas)
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        name = str(function_of(tool_choice).get("name"))
        if name not in schemas:
            raise InvalidRequest(f"tool_choice names {name!r}, which is not among the request's tools: {[*schemas]}")
        return {name}
    raise InvalidRequest(f"tool_choice {tool_choice!r} is unknown: use auto, none, required or a function's name")
