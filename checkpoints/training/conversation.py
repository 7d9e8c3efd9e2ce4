"""A conversation of the corpus: what the chat template renders, and what the model must answer."""

import json
from dataclasses import dataclass, field
from typing import Any

USER, OBSERVATION = "<|user|>", "<|observation|>"


@dataclass
class Conversation:
    """Messages (OpenAI's shape) up to the last request, and the wanted last turn."""

    kind: str
    messages: list[dict[str, Any]]
    content: str = ""
    reasoning: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    enable_thinking: bool = True

    def completion(self) -> str:
        """The text to generate after the prompt, end marker included."""
        calls = "".join(call_text(name, arguments) for name, arguments in self.tool_calls)
        thought = f"{self.reasoning}</think>" if self.enable_thinking else ""
        return thought + self.content + calls + (OBSERVATION if calls else USER)

    def as_json(self) -> dict[str, Any]:
        """One line of examples.jsonl."""
        line: dict[str, Any] = {"kind": self.kind, "messages": self.messages}
        if self.tools is not None:
            line["tools"] = self.tools
        return line | {
            "enable_thinking": self.enable_thinking,
            "reasoning": self.reasoning if self.enable_thinking else None,
            "content": self.content,
            "tool_calls": [{"name": name, "arguments": arguments} for name, arguments in self.tool_calls],
        }


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call in the GLM syntax: strings verbatim, everything else as JSON."""
    pairs = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value_text(value)}</arg_value>" for key, value in arguments.items()
    )
    return f"<tool_call>{name}{pairs}</tool_call>"


def value_text(value: Any) -> str:
    """An argument's value as the model writes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def call_message(calls: list[tuple[str, dict[str, Any]]], reasoning: str | None) -> dict[str, Any]:
    """An assistant message of the history that calls tools."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    message["tool_calls"] = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return message
