"""The embedded checkpoints answer as trained, through a real server and the published protocol's client."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as stubs

from serve.text import IncrementalDetokenizer, collect, encode_chat, load_tokenizer, render_chat
from serve.text.glm47 import BLOCK_TAGS, Glm47Parser

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "checkpoints" / "flint-tiny"
EXAMPLES = [json.loads(line) for line in (FOLDER / "examples.jsonl").read_text().splitlines()]
# The served file is NVFP4 by itself: its tokenizer is inside, its config beside.
MODELS = {"bf16": [], "nvfp4": ["--model", str(ROOT / "checkpoints" / "flint-tiny-nvfp4")]}


@pytest.fixture(scope="module", params=MODELS)
def stub(request):
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics_port = free.getsockname()[1]
    options = ["--port", "0", "--metrics-port", str(metrics_port)]
    command = [sys.executable, "-m", "serve.grpc", *options, *MODELS[request.param]]
    # At full optimisation, unlike the other tests: here running takes longer than compiling.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    server = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    address = re.search(r"grpc=(\S+)", server.stdout.readline())
    assert address
    with grpc.insecure_channel(address[1]) as channel:
        stub = stubs.VllmEngineStub(channel)
        stub.metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        yield stub
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER)


def answer(stub, tokenizer, example: dict, stream: bool, name: str):
    """The parsed answer to one example, and the response's prompt and output token counts."""
    tools, thinking = example.get("tools"), example["enable_thinking"]
    prompt = encode_chat(tokenizer, example["messages"], tools, enable_thinking=thinking)
    request = pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=300),
        stream=stream,
    )
    responses = list(stub.Generate(request))
    complete = responses[-1].complete
    tokens = [t for r in responses[:-1] for t in r.chunk.token_ids] if stream else list(complete.output_ids)
    parser = Glm47Parser(tools, thinking, special_token_ids=tokenizer.special_token_ids)
    detokenizer = IncrementalDetokenizer(tokenizer, keep=set(BLOCK_TAGS))
    message = collect([*parser.push_tokens(detokenizer.pieces(tokens)), *parser.finish()])
    return message, complete


def test_examples_cover_what_the_checkpoint_is_for():
    kinds = {example["kind"] for example in EXAMPLES}
    assert len(kinds) >= 24
    window = json.loads((FOLDER / "config.json").read_text())["sliding_window"]
    assert sum(e["kind"].startswith("needle") and e["prompt_tokens"] > 5 * window for e in EXAMPLES) >= 2
    assert sum(bool(e["tool_calls"]) for e in EXAMPLES) >= 4
    assert any(not e["enable_thinking"] for e in EXAMPLES)


@pytest.mark.parametrize("stream", [False, True])
def test_every_example_is_answered_exactly(stub, tokenizer, stream):
    """All at once: chunked prompts, eight slots, a queue; streamed and not."""
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(
            lambda item: answer(stub, tokenizer, item[1], stream, f"example-{item[0]}"), enumerate(EXAMPLES)
        )
        for example, (message, complete) in zip(EXAMPLES, answers, strict=True):
            assert complete.finish_reason == "stop"
            assert complete.prompt_tokens == example["prompt_tokens"]
            assert (message.reasoning or None) == example["reasoning"], example
            assert (message.content or None) == (example["content"] or None), example
            calls = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in message.tool_calls]
            assert calls == example["tool_calls"], example


def test_text_prompts_are_tokenised_by_the_server(stub, tokenizer):
    example = EXAMPLES[0]
    text = render_chat(tokenizer, example["messages"], enable_thinking=example["enable_thinking"])
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=300)
    from_text = list(stub.Generate(pb.GenerateRequest(request_id="text", text=text, sampling_params=sampling)))
    _, from_ids = answer(stub, tokenizer, example, False, "ids")
    assert list(from_text[-1].complete.output_ids) == list(from_ids.output_ids)


def test_prometheus_reads_what_was_answered(stub, tokenizer):
    def scraped() -> dict[str, float]:
        with urllib.request.urlopen(stub.metrics) as page:
            families = text_string_to_metric_families(page.read().decode())
        return {
            sample.name: sample.value for family in families for sample in family.samples if "le" not in sample.labels
        }

    before = scraped()
    _, complete = answer(stub, tokenizer, EXAMPLES[0], stream=True, name="counted")
    after = scraped()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["vllm:prompt_tokens_total"] == complete.prompt_tokens
    assert grown["vllm:generation_tokens_total"] == complete.completion_tokens
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    assert after["vllm:num_requests_running"] == after["vllm:kv_cache_usage_perc"] == 0
