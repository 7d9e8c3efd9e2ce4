"""Inkling's answers: reasoning, content and tool calls, one message each (spec 8.2, 8.7).

    <|message_model|>[author]<|content_thinking|>reasoning<|end_message|>
    <|message_model|><|content_text|>content<|end_message|>
    <|message_model|>NAME<|content_invoke_tool_json|>{"name":"NAME","args":{...}}<|end_message|>

`InklingParser` is a state machine fed with tokens, or with text, as they arrive. What it makes of an answer depends on
the answer alone, never on how it is cut.

Rules where the specification leaves a choice, or public parsers disagree:

* Inside a payload only `<|end_message|>` and the end of the turn count; every other control token is literal text, as
  in the model's own parser. (vLLM lets some of them open the next message.)
* A call is reported when its `<|end_message|>` has come and it is JSON, in one delta. The text of a call that is broken
  or cut off is content, so that nothing visible is lost. A call to a tool the request does not allow is dropped.
* The name in a call's JSON counts, the author before it does not: a grammar can hold the one and not the other.
  Arguments that are missing are none.
* A text call (`<|content_invoke_tool_text|>`) names no tool; it is content, as is anything else but thinking.
* The author's name between role and kind is dropped. Text there that no kind follows was no name but an answer without
  a header, and is content; so is text outside of any message. What the model writes in other roles is dropped.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from serve.text.detokenize import Piece
from serve.text.inkling_tokens import CALL, END_MESSAGE, END_TURN, KINDS, MODEL, ROLES, THINKING
from serve.text.markers import MarkerSet, marker_set, scan
from serve.text.message import Delta, ParsedMessage, ToolCallDelta, collect, merge, new_call_id
from serve.text.tool_arguments import to_json
from serve.text.tool_choice import allowed_names, tool_schemas

# Longer text behind a role is no author's name: it is shown as it comes, not held until the end.
LONGEST_AUTHOR = 128


class State(enum.Enum):
    OUTSIDE = enum.auto()  # of any message
    HEADER = enum.auto()  # behind the model's role
    CONTENT = enum.auto()  # inside a payload, as the next two
    REASONING = enum.auto()
    CALL = enum.auto()
    FOREIGN = enum.auto()  # inside a message of another role


_BETWEEN = (State.OUTSIDE, State.HEADER)
_ENDS = (END_MESSAGE, END_TURN)
_FRAME = (*ROLES, *KINDS, *_ENDS)


class InklingParser:
    """Separates the reasoning, content and tool calls of one answer while it arrives.

    Args:
        tools: the request's tools in OpenAI's shape. Calls to other names are dropped. None: any name passes.
        tool_choice: "auto"; "none": calls are removed; "required"; or {"type": "function", "function": {"name": NAME}}:
            calls to other tools are dropped. Whether a demanded call was made is `choice_honoured`.
        special_token_ids: text -> id of the tokenizer's control tokens (`Tokenizer.special_token_ids`). Needed by
            `push_tokens`. Outside of payloads all of them are removed from the answer.
        state: where the prompt leaves off; see `state_after`.
        make_call_id: makes the id of each call.

    Raises:
        InvalidRequest: `tool_choice` demands what the tools cannot give, or is of an unknown form.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        special_token_ids: Mapping[str, int] | None = None,
        *,
        state: State = State.HEADER,
        make_call_id: Callable[[], str] = new_call_id,
    ):
        self._allowed = allowed_names(tool_schemas(tools), tool_choice)
        self._demands_call = tool_choice not in ("auto", "none")
        self._make_call_id = make_call_id
        self._state = state
        self._controls = tuple(special_token_ids or _FRAME)
        self._text_of_id = {token_id: text for text, token_id in (special_token_ids or {}).items()}
        self._unsure = ""  # arrived as text, but the end of it may be the beginning of a marker
        self._held: list[str] = []  # of a header or a call: what it is shows later
        self._held_length = 0
        self._deltas: list[Delta] = []
        self._num_calls = 0

    @property
    def choice_honoured(self) -> bool:
        """False as long as a tool call that the request demands has not come."""
        return self._num_calls > 0 or not self._demands_call

    def push(self, text: str) -> list[Delta]:
        """Takes text in which every marker counts, and returns what became certain with it."""
        self._unsure += text
        self._scan()
        return self._take()

    def push_tokens(self, pieces: Iterable[Piece]) -> list[Delta]:
        """Takes (token id, text) pairs, as `IncrementalDetokenizer.pieces` gives them with control tokens kept.

        Markers count only as the control tokens they are; the same characters in other tokens are text. Do not mix
        with `push` in one answer.
        """
        for token_id, text in pieces:
            control = self._text_of_id.get(token_id) if token_id is not None else None
            if control is None:
                self._on_text(text)
            else:
                self._on_control(control)
        return self._take()

    def finish(self) -> list[Delta]:
        """Ends the answer: what was held back comes out as content."""
        self._scan(final=True)
        self._close(complete=False)
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, self._deltas = merge(self._deltas), []
        return deltas

    def _scan(self, final: bool = False) -> None:
        """Works through the text that has arrived, up to what may be the beginning of a marker."""
        self._unsure = scan(self._unsure, self._markers, self._on_text, self._on_control, final)

    def _markers(self) -> MarkerSet:
        return marker_set(*(self._controls if self._state in _BETWEEN else _ENDS))

    def _on_control(self, marker: str) -> None:
        if marker in _ENDS:
            self._close(complete=marker == END_MESSAGE)
        elif self._state not in _BETWEEN:
            self._on_text(marker)
        elif marker in ROLES:
            self._close(complete=False)
            self._state = State.HEADER if marker == MODEL else State.FOREIGN
        elif marker in KINDS:
            self._drop_held()
            self._state = {THINKING: State.REASONING, CALL: State.CALL}.get(marker, State.CONTENT)

    def _on_text(self, text: str) -> None:
        if not text or self._state is State.FOREIGN:
            return
        if self._state in (State.HEADER, State.CALL):
            self._held.append(text)
            self._held_length += len(text)
            if self._state is State.HEADER and self._held_length > LONGEST_AUTHOR:
                self._close(complete=False)
        elif self._state is State.REASONING:
            self._deltas.append(Delta(reasoning=text))
        else:
            self._deltas.append(Delta(content=text))

    def _close(self, complete: bool) -> None:
        """Ends the message; a call is one only if it is `complete`."""
        held, before = self._drop_held(), self._state
        self._state = State.OUTSIDE
        if before is State.CALL and complete and (call := _read_call(held)) is not None:
            self._on_call(*call)
        elif held and (before is State.CALL or not held.isspace()):
            self._deltas.append(Delta(content=held))

    def _drop_held(self) -> str:
        held, self._held, self._held_length = "".join(self._held), [], 0
        return held

    def _on_call(self, name: str, arguments: str) -> None:
        if self._allowed is None or name in self._allowed:
            call = ToolCallDelta(self._num_calls, self._make_call_id(), name, arguments)
            self._deltas.append(Delta(tool_calls=(call,)))
            self._num_calls += 1


def parse(
    answer: str | Iterable[Piece],
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] = "auto",
    special_token_ids: Mapping[str, int] | None = None,
    **options: Any,
) -> ParsedMessage:
    """Parses a whole answer, given as text or as (token id, text) pairs.

    The arguments and errors are those of `InklingParser`, which does the work.
    """
    parser = InklingParser(tools, tool_choice, special_token_ids, **options)
    deltas = parser.push(answer) if isinstance(answer, str) else parser.push_tokens(answer)
    return collect([*deltas, *parser.finish()], parser.choice_honoured)


def state_after(prompt: Sequence[int], special_token_ids: Mapping[str, int]) -> State:
    """Where the answer to a prompt begins (spec 8.6): behind the model's role where the prompt has appended it, outside
    of any message where it has not, inside a payload where it ends in an opened one.

    Args:
        prompt: token ids.
        special_token_ids: text -> id of the tokenizer's control tokens.
    """
    states = dict.fromkeys(_ENDS, State.OUTSIDE) | dict.fromkeys(KINDS, State.CONTENT)
    states |= {MODEL: State.HEADER, THINKING: State.REASONING, CALL: State.CALL}
    by_id = {special_token_ids[text]: state for text, state in states.items() if text in special_token_ids}
    return next((by_id[token_id] for token_id in reversed(prompt) if token_id in by_id), State.OUTSIDE)


def _read_call(payload: str) -> tuple[str, str] | None:
    """Name and arguments of a call; None if it is none."""
    try:
        call = json.loads(payload, parse_constant=_no_number)
        name, arguments = call["name"], call.get("args", {})
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        json.dumps(arguments, allow_nan=False)  # a number beyond the largest double is read as infinity
        return name, to_json(arguments)
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
        return None


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")
