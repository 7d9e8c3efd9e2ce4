"""The glm47 format: thinking blocks and tool calls in the text of an answer.

    [reasoning]</think>[content]<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>...

`Glm47Parser` is a state machine fed with text or tokens as they arrive. What it makes of an answer depends on the
answer alone, never on how it is cut; `parse` reads a whole answer with the same machine, so the two cannot disagree
but in one point: content beside tool calls is stripped only in a whole answer (see `serve.text.message.collect`).

Rules where public parsers disagree with themselves or each other:

* A call is reported when `</tool_call>` has come, in one delta. A call that is cut off yields nothing, and its text is
  not content. Reporting earlier would mean taking back: the name of a call that never ends, or the first value of a
  key that is repeated (the last value counts).
* Text between and after calls is content. White space alone before a call, or after the last one, is not.
* An opened call is only ended by `</tool_call>`, which also ends an argument it appears in; that argument is lost.
* A key without a value is dropped, as is text between an argument's tags.
* Several thinking blocks make one reasoning text; white space at the end of a block is kept only if more follows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from serve.text.detokenize import Piece
from serve.text.markers import MarkerSet, marker_set, scan
from serve.text.message import Delta, ParsedMessage, ToolCallDelta, collect, merge, new_call_id
from serve.text.tool_arguments import to_json, typed_arguments
from serve.text.tool_choice import allowed_names, tool_schemas

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

# Matched by token id where ids are known, so that a model can write about them in other tokens.
BLOCK_TAGS = (THINK, END_THINK, CALL, END_CALL)
# Always matched as text.
ARGUMENT_TAGS = (KEY, END_KEY, VALUE, END_VALUE)
# Never part of an answer; used where the tokenizer's own control tokens are not given.
DEFAULT_DROPPED = (*ROLES, "<|endoftext|>")


class State(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    IN_NAME = enum.auto()
    IN_KEY = enum.auto()
    BEFORE_VALUE = enum.auto()
    IN_VALUE = enum.auto()
    AFTER_VALUE = enum.auto()


# state -> marker -> next state. Any other marker is plain text of its state.
TRANSITIONS: dict[State, dict[str, State]] = {
    State.REASONING: {THINK: State.REASONING, END_THINK: State.CONTENT, CALL: State.IN_NAME},
    State.CONTENT: {THINK: State.REASONING, END_THINK: State.CONTENT, CALL: State.IN_NAME},
    State.IN_NAME: {KEY: State.IN_KEY, END_CALL: State.CONTENT},
    State.IN_KEY: {END_KEY: State.BEFORE_VALUE, END_CALL: State.CONTENT},
    State.BEFORE_VALUE: {VALUE: State.IN_VALUE, KEY: State.IN_KEY, END_CALL: State.CONTENT},
    State.IN_VALUE: {END_VALUE: State.AFTER_VALUE, END_CALL: State.CONTENT},
    State.AFTER_VALUE: {KEY: State.IN_KEY, END_CALL: State.CONTENT},
}


class Glm47Parser:
    """Separates the reasoning, content and tool calls of one answer while it arrives.

    Args:
        tools: the request's tools in OpenAI's shape. Calls to other names are dropped. None: any name passes, and all
            arguments are strings.
        thinking: whether think tags count. If not, they are plain content.
        tool_choice: "auto"; "none": calls are removed; "required"; or {"type": "function", "function": {"name": NAME}}:
            calls to other tools are dropped. Whether a demanded call was made is `choice_honoured`.
        special_token_ids: text -> id of the tokenizer's control tokens (`Tokenizer.special_token_ids`). Needed by
            `push_tokens`. All but the tags of this format are removed from the answer.
        in_reasoning: whether the answer begins inside the thinking block; see `starts_in_reasoning`. As `thinking` if
            not given.
        make_call_id: makes the id of each call.

    Raises:
        InvalidRequest: `tool_choice` demands what the tools cannot give, or is of an unknown form.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        tool_choice: str | Mapping[str, Any] = "auto",
        special_token_ids: Mapping[str, int] | None = None,
        *,
        in_reasoning: bool | None = None,
        make_call_id: Callable[[], str] = new_call_id,
    ):
        self._schemas = tool_schemas(tools)
        self._allowed = allowed_names(self._schemas, tool_choice)
        self._demands_call = tool_choice not in ("auto", "none")
        self._make_call_id = make_call_id
        self._transitions = TRANSITIONS if thinking else _without_thinking()
        self._state = State.REASONING if thinking and in_reasoning is not False else State.CONTENT

        special = dict.fromkeys(DEFAULT_DROPPED) if special_token_ids is None else special_token_ids
        ids = special_token_ids or {}
        self._dropped = tuple(text for text in special if text not in BLOCK_TAGS + ARGUMENT_TAGS)
        self._tag_of_id = {ids[tag]: tag for tag in BLOCK_TAGS if tag in ids}
        self._dropped_ids = {ids[text] for text in self._dropped if text in ids}

        self._by_id = False
        self._text = ""  # arrived, but the end of it may be the beginning of a marker
        self._deltas: list[Delta] = []
        self._reasoning_space: list[str] = []  # white space that is dropped unless more reasoning follows
        self._content_space: list[str] = []  # white space that is dropped if a call follows
        self._content_begun = False  # whether content has been shown since the last call
        self._part: list[str] = []  # text of the name, key or value being read
        self._name = self._key = ""
        self._arguments: dict[str, str] = {}
        self._num_calls = 0

    @property
    def choice_honoured(self) -> bool:
        """False as long as a tool call that the request demands has not come."""
        return self._num_calls > 0 or not self._demands_call

    def push(self, text: str) -> list[Delta]:
        """Takes text in which every tag counts, and returns what became certain with it."""
        self._by_id = False
        self._text += text
        self._scan()
        return self._take()

    def push_tokens(self, pieces: Iterable[Piece]) -> list[Delta]:
        """Takes (token id, text) pairs, as `IncrementalDetokenizer.pieces` gives them with control tokens kept.

        Think and tool tags count only as the control tokens they are; the same characters in other tokens are text.
        Do not mix with `push` in one answer.
        """
        self._by_id = True
        for token_id, text in pieces:
            tag = self._tag_of_id.get(token_id) if token_id is not None else None
            if tag is None and token_id not in self._dropped_ids:
                self._text += text
                self._scan()
                continue
            # A control token cannot be the continuation of a tag spelled in other tokens.
            self._scan(final=True)
            if tag in self._transitions[self._state]:
                self._on_marker(tag)
            elif tag is not None:
                self._on_text(tag)
        return self._take()

    def finish(self) -> list[Delta]:
        """Ends the answer: what was held back comes out, a call that is not complete does not."""
        self._scan(final=True)
        if not self._num_calls:
            self._show_content(self._content_space)
        self._content_space = []
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, self._deltas = merge(self._deltas), []
        return deltas

    def _scan(self, final: bool = False) -> None:
        """Works through the text that has arrived, up to what may be the beginning of a marker."""

        def on_marker(marker: str) -> None:
            if marker in self._transitions[self._state]:
                self._on_marker(marker)

        self._text = scan(self._text, self._markers, self._on_text, on_marker, final)

    def _markers(self) -> MarkerSet:
        """What is looked for in text: tags with a meaning in this state, and control tokens to remove."""
        tags = self._transitions[self._state]
        if self._by_id:
            known = self._tag_of_id.values()
            return marker_set(*(tag for tag in tags if tag not in known))
        return marker_set(*tags, *self._dropped)

    def _on_text(self, text: str) -> None:
        if self._state is State.REASONING:
            self._show_reasoning(text)
        elif self._state is State.CONTENT:
            if self._content_begun or not text.isspace():
                self._show_content([*self._content_space, text])
                self._content_space = []
                self._content_begun = True
            else:
                self._content_space.append(text)
        else:
            self._part.append(text)

    def _show_reasoning(self, text: str) -> None:
        if text.isspace():
            self._reasoning_space.append(text)
            return
        shown = text.rstrip()
        self._deltas.append(Delta(reasoning="".join([*self._reasoning_space, shown])))
        self._reasoning_space = [text[len(shown) :]]

    def _show_content(self, parts: list[str]) -> None:
        if any(parts):
            self._deltas.append(Delta(content="".join(parts)))

    def _on_marker(self, marker: str) -> None:
        """Enters the next state, with what the text since the last marker has completed."""
        before, self._state = self._state, self._transitions[self._state][marker]
        if marker in (THINK, END_THINK):
            return
        text = "".join(self._part)
        self._part = []
        if before is State.IN_NAME:
            self._name = text.strip()
        if marker == CALL:
            self._arguments = {}
            self._content_space = []
            self._content_begun = False
        elif marker == END_KEY:
            self._key = text.strip()
        elif marker == END_VALUE:
            self._arguments[self._key] = text
        elif marker == END_CALL:
            self._complete_call()

    def _complete_call(self) -> None:
        if not self._name or (self._allowed is not None and self._name not in self._allowed):
            return
        arguments = to_json(typed_arguments(self._arguments, self._schemas.get(self._name)))
        call = ToolCallDelta(self._num_calls, self._make_call_id(), self._name, arguments)
        self._deltas.append(Delta(tool_calls=(call,)))
        self._num_calls += 1


def parse(
    answer: str | Iterable[Piece],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    tool_choice: str | Mapping[str, Any] = "auto",
    special_token_ids: Mapping[str, int] | None = None,
    **options: Any,
) -> ParsedMessage:
    """Parses a whole answer, given as text or as (token id, text) pairs.

    The arguments and errors are those of `Glm47Parser`, which does the work.
    """
    parser = Glm47Parser(tools, thinking, tool_choice, special_token_ids, **options)
    deltas = parser.push(answer) if isinstance(answer, str) else parser.push_tokens(answer)
    return collect([*deltas, *parser.finish()], parser.choice_honoured)


def starts_in_reasoning(
    prompt: str | Sequence[int], *, thinking: bool = True, special_token_ids: Mapping[str, int] | None = None
) -> bool:
    """Whether the answer to a prompt begins inside a thinking block.

    It does, unless thinking is off or the prompt's last turn has closed its thinking already. A prompt without think
    tags leaves the block open.

    Args:
        prompt: the rendered prompt, as text or as token ids.
        thinking: False if the request switches thinking off.
        special_token_ids: text -> id of the tokenizer's control tokens; needed for a prompt of token ids.

    Raises:
        ValueError: token ids without `special_token_ids`.
    """
    if not thinking:
        return False
    closing, opening = (END_THINK, CALL), (THINK, *ROLES)
    if isinstance(prompt, str):
        return max(map(prompt.rfind, closing)) <= max(map(prompt.rfind, opening))
    if special_token_ids is None:
        raise ValueError("special_token_ids is needed to look for think tags in token ids")
    closes = {special_token_ids.get(tag): tag in closing for tag in closing + opening}
    return not next((closes[token_id] for token_id in reversed(prompt) if token_id in closes), False)


def _without_thinking() -> dict[State, dict[str, State]]:
    """The transitions in which think tags are plain text."""
    return {
        state: {marker: target for marker, target in markers.items() if marker not in (THINK, END_THINK)}
        for state, markers in TRANSITIONS.items()
    }
