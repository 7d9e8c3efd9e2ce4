"""A conversation through the engine in one process: messages in, deltas of text out. For the terminal and notebooks."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from serve.assemble import Assembled
from serve.request import EngineClosed, InvalidRequest, Media, Output, Request, SamplingParams
from serve.text import Delta, IncrementalDetokenizer, ParsedMessage, collect, encode_chat
from serve.text.chat_format import answer_parser, parsed_markers
from serve.text.request_messages import has_media

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
    reasoning_effort: str | float | None = None,
    sampling: SamplingParams | None = None,
) -> Iterator[Delta]:
    """Answers a conversation, yielding reasoning, content and tool calls as they come. Closing it aborts the request.

    Args:
        messages, tools: in OpenAI's shape. Pictures and clips are as `serve.media.content.load_media` takes them.
        enable_thinking: False asks for an answer without a thinking block.
        reasoning_effort: how much to think, where the model knows it: see `serve.text.encode_chat`.
        sampling: None means the checkpoint's own defaults.

    Raises:
        InvalidRequest: the request cannot be served. EngineClosed: the engine was closed before the answer's end.
        RuntimeError: the engine failed while serving it.
    """
    tokenizer, engine = assembled.tokenizer, assembled.engine
    tools = list(tools) if tools else None
    prompt, media = encode_prompt(
        assembled, messages, tools, enable_thinking=enable_thinking, reasoning_effort=reasoning_effort
    )
    parser = answer_parser(tokenizer, prompt, tools, thinking=enable_thinking)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, keep=parsed_markers(tokenizer))
    request_id = f"chat-{next(_serial)}"
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    sampling = sampling or default_sampling(assembled)
    engine.submit(Request(request_id, tuple(prompt), sampling, media), outputs.put)
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


def encode_prompt(
    assembled: Assembled,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> tuple[list[int], tuple[Media, ...]]:
    """A conversation as token ids, and its pictures and clips at their placeholders.

    Args:
        assembled: its `media_format` says what the model reads beside text.
        messages, tools: as in `stream_chat`. options: those of `serve.text.encode_chat`.

    Raises:
        InvalidRequest: the request cannot be served.
    """
    if not has_media(messages):
        return encode_chat(assembled.tokenizer, messages, tools, **options), ()
    format = assembled.media_format
    if format is None:
        raise InvalidRequest("the model reads text only: leave out pictures and sound, or serve an Inkling checkpoint")
    # The libraries behind are an extra, and slow to import.
    from serve.media.content import load_media
    from serve.media.place import place

    loaded, items = load_media(messages, format, max_tokens=assembled.engine.max_model_len)
    ids = {"image": format.image_token_id, "audio": format.audio_token_id}
    known = {kind: token_id for kind, token_id in ids.items() if token_id is not None}
    prompt = encode_chat(assembled.tokenizer, loaded, tools, placeholder_ids=known, **options)
    return prompt, place(prompt, items, format.image_token_id, format.audio_token_id)


def chat(assembled: Assembled, messages: Sequence[Mapping[str, Any]], **options: Any) -> ParsedMessage:
    """As `stream_chat`, the whole answer at once."""
    return collect(stream_chat(assembled, messages, **options))
