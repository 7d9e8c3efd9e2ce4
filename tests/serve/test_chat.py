"""A conversation in one process: how it ends, and how it is printed."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from pathlib import Path

import pytest

from serve import assemble, chat, generate
from serve.assemble import Assembled
from serve.request import EngineClosed, Output
from serve.text import Delta, ToolCallDelta, load_tokenizer

FOLDER = Path(__file__).parents[2] / "checkpoints" / "flint-tiny"
QUESTION = [{"role": "user", "content": "What is 7 + 5?"}]


class Scripted:
    """An engine that answers every request with the given outputs."""

    def __init__(self, *outputs: Output):
        self.outputs, self.aborted = outputs, []

    def submit(self, request, on_output):
        for output in self.outputs:
            on_output(output)

    def abort(self, request_id):
        self.aborted.append(request_id)


def answer(*outputs: Output):
    engine = Scripted(*outputs)
    tokenizer = load_tokenizer(FOLDER)
    try:
        return chat.chat(Assembled(engine, tokenizer, {}, "flint-tiny", FOLDER, FOLDER), QUESTION)
    finally:
        assert len(engine.aborted) == 1


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (Output("r", finish_reason="abort"), EngineClosed),
        (Output("r", finish_reason="error", error="the step failed"), RuntimeError),
    ],
)
def test_an_answer_cut_off_by_the_engine_is_an_error(end, error):
    with pytest.raises(error):
        answer(Output("r", (5, 6)), end)


def test_a_terminal_without_the_characters_still_shows_the_answer(monkeypatch):
    deltas = [Delta(content="né \ud800"), Delta(tool_calls=(ToolCallDelta(0, "c", "f", '{"x": "\\ud800é"}'),))]
    model = types.SimpleNamespace(engine=contextlib.nullcontext(), generation_config={})
    monkeypatch.setattr(assemble, "assemble", lambda *_, **__: model)
    monkeypatch.setattr(chat, "stream_chat", lambda *_, **__: deltas)
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert generate.main(["hello"]) == 0
    assert terminal.buffer.getvalue().decode() == 'n\\xe9 \\ud800\nf({"x": "\\ud800\\xe9"})\n'
