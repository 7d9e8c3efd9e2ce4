"""`make demo`: a real server, a real client, the embedded checkpoint; one streamed answer and one tool call.

Starts `python -m serve.grpc` as anybody would, talks to it with the published protocol's own client stubs, and stops
it with SIGTERM. The client renders the chat prompt and reads the answer's format itself, as a gateway does.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as stubs

from modeling.default import DEFAULT_CHECKPOINT
from serve.text import Delta, IncrementalDetokenizer, encode_chat, load_tokenizer
from serve.text.glm47 import BLOCK_TAGS, Glm47Parser

QUESTION = [{"role": "user", "content": "What is the capital of Norway?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def main() -> int:
    server = subprocess.Popen([sys.executable, "-m", "serve.grpc", "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        ready = server.stdout.readline() if server.stdout else ""
        address = re.search(r"grpc=(\S+)", ready)
        if address is None:
            print("the server did not start; its messages are above", file=sys.stderr)
            return 1
        print(ready, end="")
        with grpc.insecure_channel(address[1]) as channel:
            engine = stubs.VllmEngineStub(channel)
            print("\nuser: " + QUESTION[0]["content"])
            show(chat(engine, QUESTION))
            print("\nuser: " + WEATHER[0]["content"] + "   (with a tool: get_weather)")
            show(chat(engine, WEATHER, TOOLS))
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=60)
    print(f"\nserver stopped, exit code {code}")
    return code


def chat(engine: stubs.VllmEngineStub, messages: list[dict], tools: list[dict] | None = None) -> Iterator[Delta]:
    """One conversation over gRPC, greedy: deltas of reasoning, content and tool calls as they arrive."""
    tokenizer = load_tokenizer(DEFAULT_CHECKPOINT)
    prompt = encode_chat(tokenizer, messages, tools)
    request = pb.GenerateRequest(
        request_id="demo",
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=200),
        stream=True,
    )
    parser = Glm47Parser(tools, thinking=True, special_token_ids=tokenizer.special_token_ids)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, keep=set(BLOCK_TAGS))
    for response in engine.Generate(request):
        if response.HasField("chunk"):
            yield from parser.push_tokens(detokenizer.pieces(response.chunk.token_ids))
    yield from parser.finish()


def show(deltas: Iterator[Delta]) -> None:
    """Prints deltas as they come, each kind under its own label."""
    label = ""
    for delta in deltas:
        for kind, text in (("thinking", delta.reasoning), ("answer", delta.content)):
            if text:
                print(f"\n  {kind}: {text}" if kind != label else text, end="", flush=True)
                label = kind
        for call in delta.tool_calls:
            print(f"\n  tool call: {call.name} {call.arguments}", end="", flush=True)
    print()


if __name__ == "__main__":
    sys.exit(main())
