"""The whole way: the embedded checkpoints, their server, smg, the openai client, as the README shows it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gateway import gateway

ROOT = Path(__file__).parents[3]
NVFP4 = "checkpoints/flint-tiny-nvfp4"  # one GGUF file: the gateway gets the tokenizer inside it
# Options of the server -> the name it gives the model.
MODELS = {(): "flint-tiny", ("--model", NVFP4): "flint-tiny-nvfp4"}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module", params=MODELS, ids=MODELS.values())
def client(request, tmp_path_factory):
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "serve.grpc", "--port", "0", *request.param]
    server = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    address = re.search(r"grpc=(\S+)", server.stdout.readline())
    assert address
    options = ("--reasoning-parser", "glm45", "--tool-call-parser", "glm47_moe")
    with gateway(address[1], MODELS[request.param], tmp_path_factory.mktemp("gateway") / "log", *options) as client:
        yield client
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=60) == 0


def ask(client, messages, **options):
    """The greedy answer to one question, or to a conversation, of the one model there is."""
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    model = client.models.list().data[0].id
    return client.chat.completions.create(model=model, messages=messages, temperature=0, **options)


def test_an_answer_with_its_reasoning_and_usage(client):
    answer = ask(client, "What is the capital of Norway?")
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Oslo", "The capital of Norway is Oslo.")
    assert answer.choices[0].finish_reason == "stop"
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens


def test_the_stream_concatenates_to_the_answer(client):
    deltas = [event.choices[0].delta for event in ask(client, "What is 7 + 5?", stream=True) if event.choices]
    assert "".join(delta.content or "" for delta in deltas) == "12"
    assert len([delta for delta in deltas if getattr(delta, "reasoning_content", None)]) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call(client, stream):
    answer = ask(client, "What is the weather in Oslo?", tools=[WEATHER], stream=stream)
    if stream:
        calls = [c for e in answer if e.choices for c in e.choices[0].delta.tool_calls or []]
        name = "".join(call.function.name or "" for call in calls)
        arguments = "".join(call.function.arguments or "" for call in calls)
    else:
        call = answer.choices[0].message.tool_calls[0]
        assert answer.choices[0].finish_reason == "tool_calls"
        name, arguments = call.function.name, call.function.arguments
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Oslo"})


def test_thinking_can_be_switched_off(client):
    answer = ask(client, "What is 7 + 5?", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert answer.choices[0].message.content == "12"
    assert not getattr(answer.choices[0].message, "reasoning_content", None)


def test_a_second_turn_uses_the_tools_result(client):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"temperature": 21, "sky": "sunny"}'},
    ]
    answer = ask(client, messages, tools=[WEATHER])
    assert "21" in answer.choices[0].message.content
