"""Chat messages to a prompt, with the checkpoint's own template.

A template writes control tokens (role markers, think and tool tags) and the users' text into one string, where the two
look alike. To keep them apart, control-token strings in anything a request brings are replaced by placeholders before
rendering. In the rendered text every remaining control-token string is then the template's own; the placeholders are
turned back afterwards and encoded as plain characters.

A placeholder is letters and digits, because templates put text through JSON, strip it and cut it at tags. Placeholders
also replace the beginning of a control token at the end of a text, which might otherwise be completed by what the
template puts behind it.

One exception: think tags in an assistant message that has no reasoning of its own stay, as templates cut such content
at `</think>` to find the reasoning. They are the assistant's words, not a user's.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from serve.request import InvalidRequest
from serve.text import inkling_prompt
from serve.text.inkling_tokens import PLACEHOLDERS, XML, XML_UNNAMED, is_inkling
from serve.text.markers import marker_set
from serve.text.request_messages import (
    REASONING_FIELDS,
    Message,
    check_depth,
    check_list,
    check_text,
    check_tools,
    media_parts,
    normalised,
)
from serve.text.tokenizer import Tokenizer

_THINK_TAGS = frozenset(("<think>", "</think>"))
BUILT_IN = "inkling"  # as a template: the rendering written here in Python
_OWN_VARIABLES = frozenset(("messages", "tools", "add_generation_prompt"))


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
) -> str:
    """The prompt as text. Arguments and errors are those of `encode_chat`.

    A template writes one placeholder for a picture or clip, and so does this text of it.
    """
    choices = _Choices(**options)
    if choices.built_in(tokenizer):
        return "".join(_built_in(messages, tools, choices))
    rendered, hidden = _render(tokenizer, messages, tools, choices)
    return hidden.restore(rendered)


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
) -> list[int]:
    """The prompt as token ids.

    Args:
        tokenizer: its `chat_template` is used unless `template` says otherwise. Without a template, a tokenizer with
            Inkling's control tokens gets the built-in rendering of `serve.text.inkling_prompt`.
        messages: in OpenAI's shape. `content` is a string, None, or a list of parts; text parts are joined, except
            for Inkling. `tool_calls` may carry their arguments as an object, as its JSON text, empty or null. A picture
            or clip is {"type": "image" or "audio", "num_tokens": N}, as `serve.media.content` leaves it, and becomes
            N placeholders at its own place.
        tools: in OpenAI's shape. Pass None to keep them out of the prompt, as with a `tool_choice` of "none".
        template: Jinja source to use in place of the checkpoint's, or BUILT_IN.
        add_generation_prompt: end with the beginning of the assistant's turn; on by default.
        enable_thinking, clear_thinking: handed to the template if given. For Inkling the former, when False, is an
            effort of "none" where no effort is given.
        reasoning_effort: handed to the template if given. For Inkling a name from "none" to "max", or a number from
            0 to 0.99.
        template_kwargs: further variables for the template; its reasoning_effort counts like the argument.
        placeholder_ids: "image" and "audio" -> the token that stands for one row. The model's config names them; None
            means the tokenizer's own (spec 1.1).

    Raises:
        InvalidRequest: the messages have the wrong shape, or the template refuses them; an effort is unknown; a
            template does not write one placeholder for each picture and clip, in their order.
        ValueError: there is no template, it is no valid Jinja, or it fails.
    """
    choices = _Choices(**options)
    if choices.built_in(tokenizer):
        ids = tokenizer.special_token_ids | choices.placeholder_names()
        ids.setdefault(XML, ids.get(XML_UNNAMED, -1))
        pieces = _built_in(messages, tools, choices)
        return tokenizer.encode_pieces(_id(ids, p) if isinstance(p, inkling_prompt.Marker) else p for p in pieces)
    rendered, hidden = _render(tokenizer, messages, tools, choices)
    pieces = [hidden.restore(p) if isinstance(p, str) else p for p in tokenizer.split_special(rendered)]
    return tokenizer.encode_pieces(_expanded(pieces, media_parts(messages), tokenizer, choices))


@dataclasses.dataclass(frozen=True)
class _Choices:
    """The options of `encode_chat`."""

    template: str | None = None
    add_generation_prompt: bool = True
    enable_thinking: bool | None = None
    clear_thinking: bool | None = None
    reasoning_effort: str | float | None = None
    template_kwargs: Mapping[str, Any] | None = None
    placeholder_ids: Mapping[str, int] | None = None

    def built_in(self, tokenizer: Tokenizer) -> bool:
        """Whether Inkling's built-in rendering is used."""
        chosen = self.template == BUILT_IN or (self.template is None and tokenizer.chat_template is None)
        return chosen and is_inkling(tokenizer.special_token_ids)

    def placeholder_names(self) -> dict[str, int]:
        return {PLACEHOLDERS[kind]: token_id for kind, token_id in (self.placeholder_ids or {}).items()}

    def variables(self) -> dict[str, Any]:
        """What a template is given beside the messages and tools."""
        if self.template_kwargs is not None and not isinstance(self.template_kwargs, Mapping):
            raise InvalidRequest(f"template_kwargs must be an object, not {type(self.template_kwargs).__name__}")
        names = ("enable_thinking", "clear_thinking", "reasoning_effort")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        result = given | dict(self.template_kwargs or {})
        if taken := sorted(_OWN_VARIABLES & result.keys()):
            raise InvalidRequest(
                f"{', '.join(taken)} cannot be set as template arguments: use the request's own fields"
            )
        return result

    def effort(self) -> str | float | None:
        """Inkling's effort: the one given, or none at all where thinking is switched off."""
        variables = self.variables()
        switched_off = "none" if variables.get("enable_thinking") is False else None
        effort = variables.get("reasoning_effort")
        return switched_off if effort is None else effort


def _built_in(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, choices: _Choices
) -> Iterable[str]:
    check_list(messages, "messages", "messages with a role and content")
    if tools is not None:
        check_tools(tools)
    media_parts(messages)
    return inkling_prompt.render(messages, tools, choices.effort(), choices.add_generation_prompt)


def _id(ids: Mapping[str, int], name: str) -> int:
    if ids.get(name, -1) < 0:
        raise ValueError(f"the tokenizer lacks the control token {name}: it is not one of this model's")
    return ids[name]


def _expanded(
    pieces: Iterable[str | int], media: Sequence[tuple[str, int]], tokenizer: Tokenizer, choices: _Choices
) -> Iterator[str | int]:
    """`pieces` with the template's one placeholder for a picture or clip repeated for each of its rows."""
    own = {kind: tokenizer.special_token_ids.get(name) for kind, name in PLACEHOLDERS.items()}
    ids = {kind: token_id for kind, token_id in own.items() if token_id is not None} | dict(
        choices.placeholder_ids or {}
    )
    if missing := sorted({kind for kind, _ in media} - ids.keys()):
        raise InvalidRequest(f"the model does not read {missing[0]} parts: send text only")
    waiting = list(media)
    for piece in pieces:
        kind = next((kind for kind in ids if piece in (own[kind], ids[kind])), None)
        if kind is None:
            yield piece
        elif waiting and waiting[0][0] == kind:
            yield from [ids[kind]] * waiting.pop(0)[1]
        else:
            raise InvalidRequest(
                f"the chat template writes a placeholder for {kind} where the messages have no such part"
            )
    if waiting:
        raise InvalidRequest(f"the chat template leaves out {len(waiting)} of the messages' pictures and clips")


def _render(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, choices: _Choices
) -> tuple[str, _Placeholders]:
    source = choices.template if choices.template is not None else tokenizer.chat_template
    if source is None:
        raise ValueError(
            "the checkpoint has no chat template: add chat_template.jinja, or name a tokenizer that has one"
        )
    check_list(messages, "messages", "messages with a role and content")
    if tools is not None:
        check_tools(tools)
    extra = choices.variables()
    inkling = is_inkling(tokenizer.special_token_ids)
    if inkling and choices.effort() is not None:
        inkling_prompt.effort_text(choices.effort())  # no template may take an unknown word for a known one
        extra["reasoning_effort"] = choices.effort()

    placeholders = _Placeholders(tokenizer.special_token_ids)
    variables = placeholders.hide({"tools": list(tools) if tools else None} | extra)
    variables["messages"] = [_prepare(message, source, placeholders, join_text=not inkling) for message in messages]
    variables["add_generation_prompt"] = choices.add_generation_prompt
    compiled = _compile(source)
    try:
        return compiled.render(tokenizer.template_variables | variables), placeholders
    except (jinja2.TemplateError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise InvalidRequest(f"the chat template does not accept these messages: {error}") from error
    except Exception as error:  # the template divides by zero, or recurses for ever
        origin = f" of {tokenizer.source}" if choices.template is None and tokenizer.source is not None else ""
        raise ValueError(f"the chat template{origin} fails: {type(error).__name__}: {error}") from error


class _Placeholders:
    """Hides control-token strings in what a request brings, and brings them back in what was rendered."""

    def __init__(self, controls: Iterable[str]):
        self._controls = marker_set(*controls)
        # Random, so that no text can contain a placeholder by chance.
        self._mark = str(secrets.randbelow(9 * 10**17) + 10**17)
        self._placeholder = re.compile(f"Q{self._mark}x([0-9]+)Q")
        self._hidden: list[str] = []
        self._numbers: dict[str, int] = {}  # equal texts are hidden alike, as templates compare ids of calls

    def hide(self, value: Any, shown: frozenset[str] = frozenset(), depth: int = 0) -> Any:
        """`value` with control-token strings but those in `shown` hidden in every string, names of fields included.

        Raises:
            InvalidRequest: text that is not Unicode, or objects nested too deep to be written as JSON.
        """
        check_depth(depth)
        if isinstance(value, str):
            return self._hide_text(value, shown)
        if isinstance(value, Mapping):
            return {
                self.hide(name, shown, depth + 1): self.hide(member, shown, depth + 1) for name, member in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(member, shown, depth + 1) for member in value]
        return value

    def restore(self, rendered: str) -> str:
        """Rendered text with everything hidden back in its place."""
        text = self._placeholder.sub(lambda found: self._hidden[int(found[1])], rendered)
        if self._mark in text:
            raise InvalidRequest("the chat template rewrites text that holds control tokens: remove them from the text")
        return text

    def _hide_text(self, text: str, shown: frozenset[str]) -> str:
        check_text(text)
        text = self._controls.replace(text, lambda control: control if control in shown else self._hold(control))
        body = text.rstrip()
        end = len(body) - self._controls.held(body)  # a control token may begin here
        return body[:end] + self._hold(body[end:]) + text[len(body) :] if end < len(body) else text

    def _hold(self, text: str) -> str:
        number = self._numbers.setdefault(text, len(self._hidden))
        if number == len(self._hidden):
            self._hidden.append(text)
        return f"Q{self._mark}x{number}Q"


def _prepare(message: Message, source: str, placeholders: _Placeholders, join_text: bool) -> dict[str, Any]:
    """A message in the one shape that templates are written for."""
    prepared = normalised(message, join_text=join_text)
    if prepared["role"] == "developer" and "developer" not in source:
        prepared["role"] = "system"  # the newer name; templates that do not know it would drop the message
    hidden = placeholders.hide(prepared)
    if prepared["role"] == "assistant" and not any(prepared.get(name) for name in REASONING_FIELDS):
        hidden["content"] = placeholders.hide(prepared["content"], shown=_THINK_TAGS)
    return hidden


def check_template(source: str) -> None:
    """Raises ValueError for a template that is no valid Jinja."""
    _compile(source)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is no valid Jinja (line {error.lineno}): {error}") from error
    except Exception as error:  # nested too deep, or constants that cannot be computed
        raise ValueError(f"the chat template cannot be compiled: {type(error).__name__} {error}") from error


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What templates on the Hugging Face hub expect of their surroundings. They may come from anyone: sandboxed."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_no_json
    )


def _no_json(value: Any) -> Any:
    raise jinja2.TemplateError(f"{value!r} cannot be written as JSON")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
