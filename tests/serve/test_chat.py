"""A conversation in one process: how it ends, and how it is printed."""

from __future__ import annotations

import base64
import contextlib
import io
import sys
import types
import wave
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from serve import assemble, chat, generate
from serve.assemble import Assembled
from serve.media.format import MediaFormat
from serve.request import EngineClosed, InvalidRequest, Output
from serve.text import Delta, ToolCallDelta, load_tokenizer

FOLDER = Path(__file__).parents[2] / "checkpoints" / "flint-tiny"
QUESTION = [{"role": "user", "content": "What is 7 + 5?"}]


class Scripted:
    """An engine that answers every request with the given outputs."""

    max_model_len = 1000

    def __init__(self, *outputs: Output):
        self.outputs, self.aborted, self.submitted = outputs, [], []

    def submit(self, request, on_output):
        self.submitted.append(request)
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
    monkeypatch.setattr(chat, "encode_prompt", lambda *_, **__: ([], ()))
    monkeypatch.setattr(chat, "stream_chat", lambda *_, **__: deltas)
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert generate.main(["hello"]) == 0
    assert terminal.buffer.getvalue().decode() == 'n\\xe9 \\ud800\nf({"x": "\\ud800\\xe9"})\n'


@pytest.fixture
def inkling(tmp_path):
    """A tokenizer of bytes with Inkling's control tokens behind them."""
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    return load_tokenizer(tmp_path)


def scripted(tokenizer, answer: str, size: int, media_format=None, **end):
    """A model that gives this answer, `size` tokens at a time."""
    ids = tokenizer.encode(answer, parse_special=True)
    outputs = [Output("r", tuple(ids[i : i + size])) for i in range(0, len(ids), size)]
    engine = Scripted(*outputs, Output("r", **end))
    return Assembled(engine, tokenizer, {}, "inkling", FOLDER, FOLDER, media_format)


MODEL = "<|message_model|>"
THOUGHT = "<|content_thinking|>12, né?<|end_message|>"
ANSWER = f"{THOUGHT}{MODEL}<|content_text|>I <look>.<|end_message|>"
CALL = f'{MODEL}now<|content_invoke_tool_json|>{{"name":"now","args":{{"zone":"CET"}}}}<|end_message|>'
NOW = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_pa10_a_chat_with_inkling_in_chunks(inkling, size):
    model = scripted(inkling, ANSWER + CALL + "<|content_model_end_sampling|>", size, finish_reason=None)
    model.engine.outputs = (*model.engine.outputs[:-2], last_of(model.engine.outputs[-2], "stop"))
    parsed = chat.chat(model, QUESTION, tools=NOW, reasoning_effort="low")
    assert (parsed.reasoning, parsed.content) == ("12, né?", "I <look>.")
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("now", '{"zone": "CET"}')]
    prompt = inkling.decode(model.engine.submitted[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.startswith("<|message_system|>tool_declare<|content_xml|>[{")
    assert "Thinking effort level: 0.2<|end_message|><|message_user|><|content_text|>What is" in prompt
    assert prompt.endswith(f"<|end_message|>{MODEL}")


def last_of(output: Output, reason: str) -> Output:
    return Output("r", output.token_ids, finish_reason=reason, matched_token_id=output.token_ids[-1])


@pytest.mark.parametrize("kept", range(1, 40, 3))
def test_pa15_an_answer_of_inkling_cut_off_by_its_length(inkling, kept):
    whole = inkling.encode(ANSWER, parse_special=True)
    model = scripted(inkling, "", 1, token_ids=tuple(whole[:kept]), finish_reason="length")
    parsed = chat.chat(model, QUESTION)
    shown = inkling.decode(whole[1:kept]) if kept > 1 else ""  # the first token opens the thinking
    assert (parsed.reasoning + parsed.content).rstrip("\ufffd") == shown.rstrip("\ufffd")
    assert bool(parsed.content) == (kept > len(inkling.encode(THOUGHT, parse_special=True)) + 2)


def test_im10_pictures_and_sound_reach_the_engine_at_their_places(inkling):
    ids = {kind: inkling.special_token_ids[f"<|unused_{i}|>"] for kind, i in (("image", 200054), ("audio", 200053))}
    form = MediaFormat(image_token_id=ids["image"], audio_token_id=ids["audio"], patch_size=8)
    model = scripted(inkling, ANSWER, 64, form, finish_reason="length")
    pictures = [PIL.Image.new("RGB", (8 * columns - 1, 8), (columns, 0, 0)) for columns in (2, 3)]
    clip = io.BytesIO()
    with wave.open(clip, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(2 * 1600))
    messages = [
        {"role": "user", "content": [{"type": "image", "image": pictures[0]}, {"type": "text", "text": "é?"}]},
        {"role": "assistant", "content": "Yes."},
        {
            "role": "user",
            "content": [{"type": "audio", "audio": clip.getvalue()}, {"type": "image", "image": pictures[1]}],
        },
    ]
    assert chat.chat(model, messages).content == "I <look>."
    (request,) = model.engine.submitted
    assert [(medium.kind, len(medium.rows)) for medium in request.media] == [("image", 2), ("audio", 2), ("image", 3)]
    prompt = np.array(request.prompt_token_ids)
    for medium in request.media:
        end = medium.offset + len(medium.rows)
        assert (prompt[medium.offset : end] == ids[medium.kind]).all()
        assert ids[medium.kind] not in (prompt[medium.offset - 1], prompt[end])
    assert np.isin(prompt, [*ids.values()]).sum() == 7
    first = request.media[0]
    assert first.rows.shape[1:] == (2, 8, 8, 3)
    assert first.offset < list(prompt).index(inkling.encode("é")[0]) < request.media[1].offset


def test_media_are_refused_by_a_model_that_reads_text_only(inkling):
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
    model = scripted(inkling, ANSWER, 1)
    with pytest.raises(InvalidRequest, match="text only"):
        chat.chat(model, [message])
    assert not model.engine.submitted


def test_tk01_an_unknown_effort_never_reaches_the_engine(inkling):
    model = scripted(inkling, ANSWER, 1)
    with pytest.raises(InvalidRequest, match="reasoning_effort 'much'"):
        chat.chat(model, QUESTION, reasoning_effort="much")
    assert not model.engine.submitted


def test_the_command_line_passes_media_in_order_and_the_effort(monkeypatch, tmp_path):
    asked = []
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b.wav", "c.png"):
        Path(name).touch()
    model = types.SimpleNamespace(engine=contextlib.nullcontext(), generation_config={})
    monkeypatch.setattr(assemble, "assemble", lambda *_, **__: model)
    monkeypatch.setattr(chat, "encode_prompt", lambda *_, **__: ([], ()))
    monkeypatch.setattr(chat, "stream_chat", lambda *args, **options: asked.append((args[1], options)) or [])
    assert generate.main(["--image", "a.png", "--audio", "b.wav", "--image", "c.png", "--effort", "0.35", "hello"]) == 0
    assert generate.main(["hello"]) == 0
    (messages, options), (plain, default) = asked
    parts = messages[0]["content"]
    assert [part.get(part["type"]) for part in parts] == [Path("a.png"), Path("b.wav"), Path("c.png"), "hello"]
    assert (options["reasoning_effort"], default["reasoning_effort"]) == ("0.35", None)
    assert plain == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("media, started", [("absent.png", False), ("broken.png", True)])
def test_im05_the_command_line_refuses_files_before_anything_is_compiled(inkling, media, started, monkeypatch, capsys):
    """An absent file with the arguments, a broken one with the tokenizer at hand; the engine never starts."""
    model = scripted(inkling, ANSWER, 1, MediaFormat(image_token_id=300, audio_token_id=301))
    monkeypatch.setattr(assemble, "assemble", lambda *_, **__: model)
    file = inkling.source.parent / media
    if started:
        file.write_text("no picture")
        assert generate.main(["--image", str(file), "what?"]) == 2
    else:
        with pytest.raises(SystemExit) as stop:
            generate.main(["--image", str(file), "what?"])
        assert stop.value.code == 2
    assert ("broken" if started else "absent.png is not a file") in capsys.readouterr().err
    assert not model.engine.submitted
