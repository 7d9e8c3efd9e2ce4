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

import datetime
import functools
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from serve.request import InvalidRequest
from serve.text.markers import marker_set
from serve.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

_DEEPEST = 100  # levels of objects and lists in a request
_SURROGATE = re.compile("[\ud800-\udfff]")
_THINK_TAGS = frozenset(("<think>", "</think>"))
_REASONING_FIELDS = ("reasoning_content", "reasoning")
_OWN_VARIABLES = frozenset(("messages", "tools", "add_generation_prompt"))


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
) -> str:
    """The prompt as text. Arguments and errors are those of `encode_chat`."""
    rendered, placeholders = _render(tokenizer, messages, tools, **options)
    return placeholders.restore(rendered)


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
) -> list[int]:
    """The prompt as token ids.

    Args:
        tokenizer: its `chat_template` is used unless `template` says otherwise.
        messages: in OpenAI's shape. `content` is a string, None, or a list of parts; text parts are joined.
            `tool_calls` may carry their arguments as an object, as its JSON text, empty or null.
        tools: in OpenAI's shape. Pass None to keep them out of the prompt, as with a `tool_choice` of "none".
        template: Jinja source to use in place of the checkpoint's.
        add_generation_prompt: end with the beginning of the assistant's turn; on by default.
        enable_thinking, clear_thinking: handed to the template if given.
        template_kwargs: further variables for the template, such as reasoning_effort.

    Raises:
        InvalidRequest: the messages have the wrong shape, or the template refuses them.
        ValueError: there is no template, it is no valid Jinja, or it fails.
    """
    rendered, placeholders = _render(tokenizer, messages, tools, **options)
    pieces = tokenizer.split_special(rendered)
    return tokenizer.encode_pieces(placeholders.restore(p) if isinstance(p, str) else p for p in pieces)


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    enable_thinking: bool | None = None,
    clear_thinking: bool | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[str, _Placeholders]:
    source = template if template is not None else tokenizer.chat_template
    if source is None:
        raise ValueError(
            "the checkpoint has no chat template: add chat_template.jinja, or name a tokenizer that has one"
        )
    _check_list(messages, "messages", "messages with a role and content")
    if tools is not None:
        _check_list(tools, "tools", 'objects such as {"type": "function", "function": {...}}')
        if not all(isinstance(tool, Mapping) for tool in tools):
            raise InvalidRequest('every tool must be an object such as {"type": "function", "function": {...}}')
    if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
        raise InvalidRequest(f"template_kwargs must be an object, not {type(template_kwargs).__name__}")
    switches = {"enable_thinking": enable_thinking, "clear_thinking": clear_thinking}
    extra = {name: value for name, value in switches.items() if value is not None} | dict(template_kwargs or {})
    if taken := sorted(_OWN_VARIABLES & extra.keys()):
        raise InvalidRequest(f"{', '.join(taken)} cannot be set as template arguments: use the request's own fields")

    placeholders = _Placeholders(tokenizer.special_token_ids)
    variables = placeholders.hide({"tools": list(tools) if tools else None} | extra)
    variables["messages"] = [_prepare(message, source, placeholders) for message in messages]
    variables["add_generation_prompt"] = add_generation_prompt
    compiled = _compile(source)
    try:
        return compiled.render(tokenizer.template_variables | variables), placeholders
    except (jinja2.TemplateError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise InvalidRequest(f"the chat template does not accept these messages: {error}") from error
    except Exception as error:  # the template divides by zero, or recurses for ever
        origin = f" of {tokenizer.source}" if template is None and tokenizer.source is not None else ""
        raise ValueError(f"the chat template{origin} fails: {type(error).__name__}: {error}") from error


def _check_list(value: Any, name: str, members: str) -> None:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequest(f"{name} must be a list of {members}, not {type(value).__name__}")


class _Placeholders:
    """Hides control-token strings in what a request brings, and brings them back in what was rendered."""

    def __init__(self, controls: Iterable[str]):
        self._controls = marker_set(*controls)
        # Random, so that no text can contain a placeholder by chance.
        self._mark = str(secrets.randbelow(9 * 10**17) + 10**17)
        self._placeholder = re.compile(f"Q{self._mark}x([0-9]+)Q")
        self._hidden: list[str] = []

    def hide(self, value: Any, shown: frozenset[str] = frozenset(), depth: int = 0) -> Any:
        """`value` with control-token strings but those in `shown` hidden in every string, names of fields included.

        Raises:
            InvalidRequest: text that is not Unicode, or objects nested too deep to be written as JSON.
        """
        if depth > _DEEPEST:
            raise InvalidRequest(f"the messages or tools are nested deeper than {_DEEPEST} levels")
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
        if found := _SURROGATE.search(text):
            message = f"text holds half of a surrogate pair, U+{ord(found[0]):04X}, which is no character; remove it"
            raise InvalidRequest(message)
        text = self._controls.replace(text, lambda control: control if control in shown else self._hold(control))
        body = text.rstrip()
        end = len(body) - self._controls.held(body)  # a control token may begin here
        return body[:end] + self._hold(body[end:]) + text[len(body) :] if end < len(body) else text

    def _hold(self, text: str) -> str:
        self._hidden.append(text)
        return f"Q{self._mark}x{len(self._hidden) - 1}Q"


def _prepare(message: Message, source: str, placeholders: _Placeholders) -> dict[str, Any]:
    """A message in the one shape that templates are written for."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest("every message must be an object with a role")
    prepared = dict(message) | {"content": _content(message.get("content"))}
    if prepared["role"] == "developer" and "developer" not in source:
        prepared["role"] = "system"  # the newer name; templates that do not know it would drop the message
    if prepared.get("tool_calls"):
        _check_list(prepared["tool_calls"], "tool_calls", "objects with a function")
        prepared["tool_calls"] = [_tool_call(call) for call in prepared["tool_calls"]]
    hidden = placeholders.hide(prepared)
    if prepared["role"] == "assistant" and not any(prepared.get(name) for name in _REASONING_FIELDS):
        hidden["content"] = placeholders.hide(prepared["content"], shown=_THINK_TAGS)
    return hidden


def _content(content: Any) -> Any:
    """Text parts are joined, as most templates know only strings; other parts are the template's to render."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"a message's content must be a string or a list of parts, not {type(content).__name__}")
    texts = [text for part in content if (text := part if isinstance(part, str) else _part_text(part)) is not None]
    return "".join(texts) if len(texts) == len(content) else list(content)


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
