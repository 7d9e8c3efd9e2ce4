"""The embedded Inkling as a user meets it: a real server, smg in front, the openai client; text, pictures and sound."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import wave
from pathlib import Path
from random import Random

import openai
import pytest
from PIL import Image

from checkpoints.training.inkling.pictures import Picture
from checkpoints.training.inkling.sights import a_picture, a_tone, seen
from checkpoints.training.inkling.tones import Tone

sys.path.insert(0, str(Path(__file__).parent / "grpc"))
from gateway import gateway

ROOT = Path(__file__).parents[2]
MODEL = "inkling-tiny"
PARSERS = ("--reasoning-parser", "inkling", "--tool-call-parser", "inkling")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    command = [sys.executable, "-m", "serve.grpc", "--port", "0", "--model", str(ROOT / "checkpoints" / MODEL)]
    command += ["--max-model-len", "1024", "--num-slots", "4"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    line = server.stdout.readline()
    assert "reads=text,image,audio" in line
    address = re.search(r"grpc=(\S+)", line)
    assert address
    with gateway(address[1], MODEL, tmp_path_factory.mktemp("gateway") / "log", *PARSERS) as client:
        yield client
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=60) == 0


def url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png(picture: Picture) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture.pixels).save(file, "PNG")
    return file.getvalue()


def wav(tone: Tone, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(tone.samples.astype("<i2").tobytes())
    return file.getvalue()


def picture_part(picture: Picture) -> dict:
    return {"type": "image_url", "image_url": {"url": url("image/png", png(picture))}}


def sound_part(tone: Tone) -> dict:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(tone)).decode(), "format": "wav"}}


def text(question: str) -> dict:
    return {"type": "text", "text": question}


def ask(client, *turns, **options):
    """`turns` are contents, the user's and the assistant's in turn: the answer's message."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(turns)]
    options = {"temperature": 0, "max_tokens": 120} | options
    return client.chat.completions.create(model=MODEL, messages=messages, **options).choices[0].message


PICTURES = [a_picture(Random(f"server-{i}"), held=True) for i in range(6)]
TONES = [a_tone(Random(f"server-{i}"), held=True) for i in range(6)]


def test_a_question_with_and_without_thinking(client):
    answer = ask(client, "What is the capital of France?")
    assert answer.content == "Paris"
    assert "Paris" in answer.reasoning_content
    quick = ask(client, "What is the capital of France?", reasoning_effort="none")
    assert quick.content == "Paris"
    assert not getattr(quick, "reasoning_content", None)


def test_a_stream_is_the_whole_answer(client):
    whole = ask(client, "What is the capital of France?")
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    reasoning, content, usage = "", "", None
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
    assert (reasoning, content) == (whole.reasoning_content, whole.content)
    assert usage is not None
    assert usage.completion_tokens > 3


def test_a_tool_is_called(client):
    answer = ask(client, "What is the weather in Paris?", tools=[WEATHER])
    [call] = answer.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("picture", PICTURES, ids=seen)
def test_pictures_are_seen(client, picture):
    assert ask(client, [picture_part(picture), text("What colour is the shape?")]).content == picture.colour
    assert ask(client, [text("Which shape is this?"), picture_part(picture)]).content == picture.shape


@pytest.mark.parametrize("tone", TONES, ids=lambda tone: tone.note)
def test_tones_are_heard(client, tone):
    assert ask(client, [sound_part(tone), text("Which note is this?")]).content == tone.note


def test_a_conversation_with_a_picture_and_a_sound(client):
    """Each stays at its own place, turns later too."""
    picture, tone = PICTURES[0], TONES[0]
    first = [picture_part(picture), sound_part(tone), text("What do you see and hear?")]
    expected = f"{seen(picture)} and the note {tone.note}."
    expected = expected[0].upper() + expected[1:]
    assert ask(client, first).content == expected
    one_by_one = [
        [picture_part(picture), text("Which shape is this?")],
        picture.shape,
        [sound_part(tone), text("Which note is this?")],
    ]
    assert ask(client, *one_by_one).content == tone.note


def test_broken_files_are_refused_and_hurt_nobody(client):
    """While others are answered rightly."""
    answers: list[tuple[str, str]] = []

    def ask_about(picture: Picture) -> None:
        for _ in range(3):
            content = ask(client, [picture_part(picture), text("What colour is the shape?")]).content
            answers.append((picture.colour, content))

    threads = [threading.Thread(target=ask_about, args=[picture]) for picture in PICTURES[:3]]
    for thread in threads:
        thread.start()
    good = png(PICTURES[0])
    for data in (b"", good[: len(good) // 2], b"not a picture", os.urandom(300)):
        broken = {"type": "image_url", "image_url": {"url": url("image/png", data)}}
        with pytest.raises(openai.BadRequestError):
            ask(client, [broken, text("What colour is the shape?")])
    broken = {"type": "input_audio", "input_audio": {"data": base64.b64encode(good).decode(), "format": "wav"}}
    with pytest.raises(openai.BadRequestError):
        ask(client, [broken, text("Which note is this?")])
    for thread in threads:
        thread.join()
    assert len(answers) == 9
    assert all(colour == content for colour, content in answers)
