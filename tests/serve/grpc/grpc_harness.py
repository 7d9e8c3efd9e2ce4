"""A real server on a free port with the stub engine behind it, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import tokenizers
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc
from stub_engine import StubEngine

from serve.grpc.auth import TokenFile
from serve.grpc.server import Server
from serve.media.format import MediaFormat
from serve.text.load import load_tokenizer

SENTENCE = "A wide blue sky above"
END = "<|endoftext|>"
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_request_ids = (f"request-{i}" for i in itertools.count())


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE that knows the words of SENTENCE as one token each, and a chat template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    specials = [END, "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SENTENCE] * 5, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": _TEMPLATE,
        "added_tokens_decoder": {str(i): {"content": text, "special": True} for i, text in enumerate(specials)},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "flint", "architectures": ["FlintForCausalLM"]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 0.7}))


@dataclasses.dataclass
class StubModel:
    """What `serve.assemble.assemble` returns, around the stub engine."""

    engine: StubEngine
    tokenizer: object
    generation_config: dict
    model_name: str
    model_dir: Path
    tokenizer_dir: Path
    media_format: MediaFormat | None = None


def stub_model(folder: Path, media_format: MediaFormat | None = None, **engine_settings) -> StubModel:
    settings = {"vocab_size": 1024, "eos_token_ids": (0,)} | engine_settings
    generation_config = {"temperature": 0.7, "top_p": 0.95, "top_k": 20}
    name = "stub-flint" if media_format is None else "stub-inkling"
    engine, tokenizer = StubEngine(**settings), load_tokenizer(folder)
    return StubModel(engine, tokenizer, generation_config, name, folder, folder, media_format)


async def _end_tasks() -> None:
    """What `asyncio.run` does before it closes its loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


@contextlib.contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread. All servers of a test run share one: gRPC keeps what it ever bound to a loop until
    the last of its servers is gone, and then touches every one of these loops, which must not be closed yet.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    gc.collect()
    asyncio.run_coroutine_threadsafe(_end_tasks(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Harness:
    """Use as a context manager. `load=False` leaves the server as it is while a model loads."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        folder: Path,
        *,
        load: bool = True,
        max_message_mb: int = 256,
        services: tuple[str, ...] | None = None,
        credentials: grpc.ServerCredentials | None = None,
        tokens: TokenFile | None = None,
        **settings,
    ):
        self.model = stub_model(folder, **settings)
        self.engine, self.tokenizer = self.model.engine, self.model.tokenizer
        self.engine.start()
        self._load, self._options = load, (max_message_mb, services, credentials, tokens)
        self._loop = loop
        self._channels: list[grpc.Channel] = []

    def __enter__(self) -> Harness:
        self.server = self.call(self._make())
        self.channel = self.connect()
        self.stub = pb_grpc.VllmEngineStub(self.channel)
        self.tokenspeed = tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub(self.channel)
        if self._load:
            self.load()
        return self

    async def _make(self) -> Server:
        server = Server("127.0.0.1", 0, *self._options)
        await server.start()
        return server

    def __exit__(self, *exc) -> None:
        for channel in self._channels:
            channel.close()
        self.call(self.server.stop())
        self.engine.close()

    def call(self, coroutine, timeout: float = 20.0):
        """Runs a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def load(self) -> None:
        self.call(self.server.ready(self.model, "served-name"))

    def connect(self, *options: tuple[str, int]) -> grpc.Channel:
        """A channel with a connection of its own."""
        options = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1), *options)
        self._channels.append(grpc.insecure_channel(self.server.address, options=options))
        return self._channels[-1]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, parse_special=True)

    def decode(self, ids) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def generate(self, prompt, *, stream: bool = False, timeout: float = 10.0, **sampling) -> list[pb.GenerateResponse]:
        """All messages of one call."""
        return list(self.stub.Generate(request(prompt, stream=stream, **sampling), timeout=timeout))

    def complete(self, prompt, **sampling) -> pb.GenerateComplete:
        """The one message of a call that is not streamed."""
        (message,) = self.generate(prompt, **sampling)
        return message.complete

    def wait_idle(self, seconds: float = 1.0) -> None:
        """Fails unless every request has left the engine, and every call the servicer, within `seconds`."""
        deadline = time.monotonic() + seconds
        while self.busy():
            assert time.monotonic() < deadline, self.engine.stats()
            time.sleep(0.005)

    def busy(self) -> bool:
        stats = self.engine.stats()
        return bool(stats.num_running or stats.num_waiting or self.server.service.num_active)

    def wait_for(self, condition, seconds: float = 5.0) -> None:
        """Waits until `condition(engine stats)` holds."""
        deadline = time.monotonic() + seconds
        while not condition(self.engine.stats()):
            assert time.monotonic() < deadline, self.engine.stats()
            time.sleep(0.002)


def request(prompt, *, stream: bool = False, request_id: str | None = None, **sampling) -> pb.GenerateRequest:
    """A GenerateRequest; `prompt` is text or token ids."""
    choice = sampling.pop("choice", None)
    message = pb.GenerateRequest(request_id=request_id or next(_request_ids), stream=stream)
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.tokenized.input_ids.extend(prompt)
    message.sampling_params.CopyFrom(pb.SamplingParams(**sampling))
    if choice is not None:
        message.sampling_params.choice.choices.extend(choice)
    return message


def chunks(messages) -> list[pb.GenerateStreamChunk]:
    return [message.chunk for message in messages if message.HasField("chunk")]


def completes(messages) -> list[pb.GenerateComplete]:
    return [message.complete for message in messages if message.HasField("complete")]
