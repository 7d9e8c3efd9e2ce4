"""Conversations to text and tokens, through the chat template that the server uses."""

import json
from functools import cache
from typing import Any

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpoints.training.conversation import Conversation
from checkpoints.training.tokenizer import CHECKPOINT, END, load_tokenizer


@cache
def template() -> Any:
    """The checkpoint's chat template; a test holds its prompts equal to the server's, which takes longer to render."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment.filters["tojson"] = tojson
    return environment.from_string((CHECKPOINT / "chat_template.jinja").read_text())


def prompt_text(conversation: Conversation) -> str:
    """What the model is given."""
    return template().render(
        messages=conversation.messages,
        tools=conversation.tools,
        add_generation_prompt=True,
        enable_thinking=conversation.enable_thinking,
    )


@cache
def _marks() -> tuple[int, frozenset[int], frozenset[int]]:
    ids = load_tokenizer().get_vocab()
    return ids["<|assistant|>"], frozenset((ids["<think>"], ids["</think>"])), frozenset(ids[text] for text in END)


def encode(conversation: Conversation) -> tuple[np.ndarray, np.ndarray, int]:
    """Token ids, which of them the model must produce (every assistant turn's), and where the last turn starts."""
    tokenizer = load_tokenizer()
    prompt = tokenizer.encode(prompt_text(conversation), add_special_tokens=False).ids
    ids = prompt + tokenizer.encode(conversation.completion(), add_special_tokens=False).ids
    return np.array(ids, np.uint16), produced(ids), len(prompt)


def produced(ids: list[int]) -> np.ndarray:
    """Marks what follows an assistant marker and the think tag that the template adds to it, up to the turn's end."""
    assistant, think, ends = _marks()
    mask = np.zeros(len(ids), bool)
    inside = False
    for i, token in enumerate(ids):
        if inside:
            mask[i] = not (ids[i - 1] == assistant and token in think)
            inside = token not in ends
        elif token == assistant:
            inside = True
    return mask
