"""Through a real gateway: smg in front of the server, the openai client in front of smg."""

import openai
import pytest
from gateway import gateway
from grpc_harness import SENTENCE, Harness

MODEL = "served-name"


@pytest.fixture(scope="module")
def harness(loop, model_folder):
    with Harness(loop, model_folder, step_seconds=0.001) as harness:
        yield harness


@pytest.fixture(scope="module")
def client(harness, tmp_path_factory):
    with gateway(harness.server.address, MODEL, tmp_path_factory.mktemp("gateway") / "log") as client:
        yield client


def user(text: str) -> list:
    return [{"role": "user", "content": text}]


def test_chat(client, harness):
    answer = client.chat.completions.create(model=MODEL, messages=user(SENTENCE), max_tokens=6, seed=1)
    # The stub repeats its prompt, from the second token on because of the seed.
    prompt = harness.engine.submitted[-1].prompt_token_ids
    assert harness.decode(prompt) == f"<|user|>{SENTENCE}<|assistant|>"
    assert answer.choices[0].message.content == SENTENCE
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 6)


def test_the_gateway_applies_the_model_s_defaults(client, harness):
    client.chat.completions.create(model=MODEL, messages=user("A"), max_tokens=1)
    sampling = harness.engine.submitted[-1].sampling
    assert (round(sampling.temperature, 6), round(sampling.top_p, 6), sampling.top_k) == (0.7, 0.95, 20)
    client.chat.completions.create(model=MODEL, messages=user("A"), max_tokens=1, temperature=0, top_p=0.5)
    sampling = harness.engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 0.5)


def test_streamed_chat_with_usage(client):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=user(SENTENCE),
        max_tokens=6,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(stream)
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == SENTENCE
    assert next(event.usage for event in events if event.usage).completion_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
def test_sa05_stop_string_inside_a_token(client, harness, stream):
    sampling = {"messages": user(SENTENCE), "max_tokens": 50, "seed": 1, "stop": ["lue sky"]}
    if stream:
        events = list(client.chat.completions.create(model=MODEL, stream=True, **sampling))
        text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
        reason = next(e.choices[0].finish_reason for e in events if e.choices and e.choices[0].finish_reason)
    else:
        answer = client.chat.completions.create(model=MODEL, **sampling)
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == ("A wide b", "stop")
    harness.wait_idle()


def test_stop_string_at_a_token(client):
    answer = client.chat.completions.create(model=MODEL, messages=user(SENTENCE), max_tokens=9, seed=1, stop=" blue")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("A wide", "stop")


def test_n_and_logprobs(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=user(SENTENCE), max_tokens=5, seed=1, n=2, logprobs=True, top_logprobs=2
    )
    assert sorted(choice.index for choice in answer.choices) == [0, 1]
    first = next(choice for choice in answer.choices if choice.index == 0)
    assert first.message.content == SENTENCE
    assert [len(entry.top_logprobs) for entry in first.logprobs.content] == [2] * 5
    assert {entry.logprob for entry in first.logprobs.content} == {-0.5}


def test_completions(client):
    answer = client.completions.create(model=MODEL, prompt=SENTENCE, max_tokens=5)
    assert answer.choices[0].text == SENTENCE


def test_gr02_client_that_hangs_up_frees_its_slot(client, harness):
    stream = client.chat.completions.create(model=MODEL, messages=user(SENTENCE), max_tokens=3000, stream=True)
    next(iter(stream))
    stream.close()
    harness.wait_idle(1.5)


def test_gr10_errors_reach_the_client(client, harness):
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(model=MODEL, messages=user("A " * 5000), max_tokens=5)
    assert 400 <= error.value.status_code < 500
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(
            model=MODEL, messages=user("A"), max_tokens=5, tools=[tool], tool_choice="required"
        )
    assert error.value.status_code == 501 and "does not constrain output yet" in str(error.value)
    harness.wait_idle()
