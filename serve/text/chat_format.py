"""Which of the known formats a model answers in, and the parser for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve.text import glm47, inkling
from serve.text.inkling_tokens import is_inkling
from serve.text.tokenizer import Tokenizer

type AnswerParser = glm47.Glm47Parser | inkling.InklingParser


def answer_parser(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    thinking: bool = True,
    tool_choice: str | Mapping[str, Any] = "auto",
) -> AnswerParser:
    """The parser of the answer to a prompt: Inkling's if the tokenizer has Inkling's control tokens, else GLM-4.7's.

    Args:
        tokenizer: the model's.
        prompt: token ids; its end decides where the answer begins.
        tools, tool_choice: the request's.
        thinking: whether GLM-4.7's think tags count. Inkling's reasoning is always told apart.

    Raises:
        InvalidRequest: `tool_choice` demands what the tools cannot give, or is of an unknown form.
    """
    ids = tokenizer.special_token_ids
    if is_inkling(ids):
        return inkling.InklingParser(tools, tool_choice, ids, state=inkling.state_after(prompt, ids))
    in_reasoning = glm47.starts_in_reasoning(prompt, special_token_ids=ids)
    return glm47.Glm47Parser(tools, thinking, tool_choice, ids, in_reasoning=in_reasoning)


def parsed_markers(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Control tokens the parser must see: `IncrementalDetokenizer` is to keep them."""
    return tuple(tokenizer.special_token_ids) if is_inkling(tokenizer.special_token_ids) else glm47.BLOCK_TAGS
