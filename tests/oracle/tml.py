"""A chat rendered and parsed by tml-renderers, the renderer of Inkling's makers."""

from __future__ import annotations

import json
import tempfile
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tml_renderers import chat, tokenizers, v0

TOKENIZER = tokenizers.O200kBaseChatTokenizer()
RENDERER = v0.Renderer(TOKENIZER)
IMAGE_TOKEN, AUDIO_TOKEN = (TOKENIZER.encode_special(name) for name in ("unused_200054", "unused_200053"))
_SAMPLES_A_FRAME = 800


def render(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, effort: float
) -> list[int]:
    """Token ids of a chat in OpenAI's shape, without a generation prompt."""
    parts = list(messages)
    if tools:
        leading = next((i for i, m in enumerate(parts) if m["role"] not in ("system", "developer")), len(parts))
        parts.insert(leading, {"role": "tool_declare", "content": json.dumps([_tool(tool) for tool in tools])})
    with tempfile.TemporaryDirectory() as folder:
        native = _native(parts, Path(folder))
        spans, _ = RENDERER.render_for_completion_with_effort(native, effort)
        return [token for span in spans for token in _tokens(span.span)]


def parse(token_ids: Sequence[int]) -> list[Any]:
    """The messages an answer amounts to; raises `v0.ParseError`."""
    _, parser = RENDERER.render_for_completion([])
    return parser.parse_tokens(list(token_ids))


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool["function"].items() if value is not None}
    return {"type": tool.get("type", "function"), "function": function}


def _native(messages: Sequence[Mapping[str, Any]], folder: Path) -> list[Any]:
    """Through the package's own reading of OpenAI's shape, which takes neither reasoning fields nor media."""
    names: dict[str, str] = {}
    native = []
    for message in messages:
        prepared = dict(message)
        role = prepared["role"] = {"developer": "system"}.get(message["role"], message["role"])
        if role == "assistant":
            prepared["content"] = _assistant_content(prepared)
            names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or () if "id" in call}
        if role == "tool" and not message.get("name") and message.get("tool_call_id") in names:
            prepared["name"] = names[message["tool_call_id"]]
        is_error, media = prepared.pop("is_error", False), []
        if isinstance(prepared.get("content"), list):
            media = [part for part in prepared["content"] if "num_tokens" in part]
            prepared["content"] = [
                {"type": "text", "text": f"medium {i} {part['type']}"} if "num_tokens" in part else part
                for i, part in enumerate(prepared["content"])
            ]
        for opened in chat.OpenAIMessage.from_oss_messages([prepared]):
            for one in opened.to_messages():
                if isinstance(one.content, chat.Text) and one.content.text.startswith("medium ") and media:
                    one = one.copy(content=_medium(media.pop(0), folder))
                elif isinstance(one.content, chat.Text) and is_error:
                    one = one.copy(content=chat.ToolError(one.content.text))
                native.append(one)
    return native


def _assistant_content(message: dict[str, Any]) -> Any:
    reasoning = message.pop("reasoning_content", None) or message.pop("reasoning", None)
    content = message.get("content")
    if not reasoning:
        return content
    rest = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    return [{"type": "thinking", "thinking": reasoning}, *rest]


def _medium(part: Mapping[str, Any], folder: Path) -> Any:
    """A picture of one row of patches, or silence, of the right number of tokens."""
    count = part["num_tokens"]
    if part["type"] == "image":
        return chat.ImagePointer("a.png", chat.ImageFormat.Png, 40 * count - 1, 40)
    path = folder / f"{count}.wav"
    with wave.open(str(path), "wb") as clip:
        clip.setnchannels(1)
        clip.setsampwidth(2)
        clip.setframerate(16_000)
        clip.writeframes(bytes(2 * _SAMPLES_A_FRAME * count))
    return chat.AudioPointer(str(path), chat.AudioFormat.Wav, _SAMPLES_A_FRAME * count, 16_000)


def _tokens(span: Any) -> list[int]:
    if isinstance(span, chat.EncodedTextTokenSpan):
        return list(span.tokens)
    if isinstance(span, chat.ImageAssetPointerTokenSpan):
        return [IMAGE_TOKEN] * span.num_tokens
    return [AUDIO_TOKEN] * span.token_count()
