"""A conversation through the engine in one process: messages in, deltas of text out. For the terminal and notebooks."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from serve.assemble import Assembled
from serve.request import EngineClosed, Output, Request, SamplingParams
from serve.text import Delta, IncrementalDetokenizer, ParsedMessage, collect, encode_chat
from serve.text.glm47 import BLOCK_TAGS, Glm47Parser, starts_in_reasoning

_serial = itertools.count()


def default_sampling(assembled: Assembled, **changes: Any) -> SamplingParams:
    """The checkpoint's own sampling values, with `changes` over them (None leaves the default)."""
    given = {name: value for name, value in changes.items() if value is not None}
    return SamplingParams(**dict(assembled.generation_config) | given)


def stream_chat(
    assembled: Assembled,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    enable_thinking: bool = True,
    sampling: SamplingParams | None = None,
) -> Iterator[Delta]:
    """Answers a conversation, yielding reasoning, content and tool calls as they come. Closing it aborts the request.

    Args:
        messages, tools: in OpenAI's shape.
        enable_thinking: False asks for an answer without a thinking block.
        sampling: None means the checkpoint's own defaults.

    Raises:
        InvalidRequest: the request cannot be served. EngineClosed: the engine was closed before the answer's end.
        RuntimeError: the engine failed while serving it.
    """
    tokenizer, engine = assembled.tokenizer, assembled.engine
    prompt = encode_chat(tokenizer, messages, tools, enable_thinking=enable_thinking)
    parser = Glm47Parser(
        list(tools) if tools else None,
        enable_thinking,
        special_token_ids=tokenizer.special_token_ids,
        in_reasoning=starts_in_reasoning(prompt, special_token_ids=tokenizer.special_token_ids),
    )
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, keep=set(BLOCK_TAGS))
    request_id = f"chat-{next(_serial)}"
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(Request(request_id, tuple(prompt), sampling or default_sampling(assembled)), outputs.put)
    try:
        while True:
            output = outputs.get()
            tokens = output.token_ids
            if output.finish_reason == "stop":
                tokens = tokens[:-1]  # the end token is not part of the answer
            yield from parser.push_tokens(detokenizer.pieces(tokens))
            if output.finish_reason == "error":
                raise RuntimeError(output.error)
            if output.finish_reason == "abort":
                raise EngineClosed("the engine was closed before the answer was complete")
            if output.finish_reason:
                break
        yield from parser.push_tokens([(None, detokenizer.flush())])
        yield from parser.finish()
    finally:
        engine.abort(request_id)


def chat(assembled: Assembled, messages: Sequence[Mapping[str, Any]], **options: Any) -> ParsedMessage:
    """As `stream_chat`, the whole answer at once."""
    return collect(stream_chat(assembled, messages, **options))
