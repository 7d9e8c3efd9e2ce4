"""Health, reflection, keepalive, information and the tokenizer."""

import hashlib
import io
import json
import socket
import sys
import threading
import time
import types
import zipfile
from pathlib import Path

import grpc
import pytest
from grpc_harness import SENTENCE, request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serve.grpc import server as server_module
from serve.grpc.server import Server, server_options
from serve.text import gguf_metadata
from serve.text.load import load_tokenizer

Health = health_pb2.HealthCheckResponse
EMBEDDED = Path(__file__).parents[3] / "checkpoints"
SERVICE = "vllm.grpc.engine.VllmEngine"


def check(harness, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(harness.channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status


def test_gr08_health_follows_loading_serving_and_draining(serving):
    harness = serving(load=False, step_seconds=0.01)
    watch = health_pb2_grpc.HealthStub(harness.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert next(watch).status == check(harness) == check(harness, SERVICE) == Health.NOT_SERVING
    for call in (lambda: harness.stub.HealthCheck(pb.HealthCheckRequest()), lambda: harness.generate([5])):
        with pytest.raises(grpc.RpcError) as error:
            call()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE and "loading" in error.value.details()

    harness.load()
    assert next(watch).status == check(harness) == check(harness, SERVICE) == Health.SERVING
    assert harness.stub.HealthCheck(pb.HealthCheckRequest()).healthy

    running = harness.stub.Generate(request([5, 6], stream=True, max_tokens=40))
    next(running)
    drain = threading.Thread(target=lambda: harness.call(harness.server.drain(10)))
    drain.start()
    assert next(watch).status == check(harness) == Health.NOT_SERVING
    assert not harness.stub.HealthCheck(pb.HealthCheckRequest()).healthy
    with pytest.raises(grpc.RpcError) as error:
        harness.generate([5])
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE and "shutting down" in error.value.details()
    assert list(running)[-1].complete.completion_tokens == 40  # what ran before could finish
    drain.join()
    watch.cancel()


def test_drain_ends_what_takes_too_long_with_unavailable(serving):
    harness = serving(step_seconds=0.01)
    running = harness.stub.Generate(request([5, 6], stream=True, max_tokens=4000))
    next(running)
    harness.call(harness.server.drain(0.1))
    with pytest.raises(grpc.RpcError) as error:
        list(running)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE and "send it again" in error.value.details()
    assert not harness.busy()


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_is_noticed(serving, caplog, stream):
    harness = serving(prefill_seconds=60)
    watch = health_pb2_grpc.HealthStub(harness.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert next(watch).status == Health.SERVING
    running = harness.stub.Generate(request([5, 6], stream=stream, n=2), timeout=10)
    harness.wait_for(lambda stats: stats.num_running == 2)
    harness.engine.die()
    with pytest.raises(grpc.RpcError) as error:
        list(running)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE and "engine has failed" in error.value.details()
    assert next(watch).status == check(harness) == check(harness, SERVICE) == Health.NOT_SERVING
    assert not harness.stub.HealthCheck(pb.HealthCheckRequest()).healthy
    with pytest.raises(grpc.RpcError) as error:
        harness.generate([5])
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE and "engine has failed" in error.value.details()
    assert [record.levelname for record in caplog.records if "engine" in record.message] == ["ERROR"]
    watch.cancel()


def test_gr08_unknown_service(quick):
    with pytest.raises(grpc.RpcError) as error:
        check(quick, "no.such.Service")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    watch = health_pb2_grpc.HealthStub(quick.channel).Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
    assert next(watch).status == Health.SERVICE_UNKNOWN
    watch.cancel()


def pings_for(harness, seconds: float) -> str:
    """Opens a silent stream whose client pings as often as gRPC lets it, once a second; how it ended."""
    channel = harness.connect(
        ("grpc.keepalive_time_ms", 10),
        ("grpc.keepalive_timeout_ms", 2000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    )
    call = type(harness.stub)(channel).Generate(request([5], stream=True), timeout=seconds)
    try:
        list(call)
    except grpc.RpcError as error:
        return f"{error.code().name} {error.details()}"
    return "finished"


def test_gr06_frequent_pings_on_a_silent_stream_are_tolerated(serving):
    harness = serving(prefill_seconds=60)
    assert pings_for(harness, 4.5).startswith("DEADLINE_EXCEEDED")


def test_gr06_without_the_options_such_a_connection_is_closed(serving, monkeypatch):
    monkeypatch.setattr(server_module, "server_options", lambda max_message_mb: [])
    harness = serving(prefill_seconds=60)
    assert "UNAVAILABLE Too many pings" in pings_for(harness, 10)


def test_gr06_option_spelling():
    options = dict(server_options())
    assert options["grpc.http2.max_ping_strikes"] == 0
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == 10_000  # the "recv" spelling is ignored
    assert options["grpc.keepalive_permit_without_calls"] == 1


def test_reflection_lists_the_services(quick):
    stub = reflection_pb2_grpc.ServerReflectionStub(quick.channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=5)
    names = {service.name for service in answer.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def test_a_taken_port_is_an_error(quick):
    async def start_and_stop(port: int) -> None:
        server = Server("127.0.0.1", port)
        try:
            await server.start()
        finally:  # a server left behind would hang the test's process
            await server.stop()

    async def scenario():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(OSError, match="port is taken"):
                await start_and_stop(taken.getsockname()[1])
        first = Server("127.0.0.1", 0)
        await first.start()
        try:
            with pytest.raises(OSError, match="Choose another"):  # nor do two servers share one
                await start_and_stop(first.port)
        finally:
            await first.stop()

    quick.call(scenario())


def test_model_info(quick):
    facts = quick.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5)
    assert (facts.served_model_name, facts.model_path, facts.model_type) == ("served-name", "stub-flint", "flint")
    assert (facts.max_context_length, facts.max_req_input_len, facts.vocab_size) == (4096, 4095, 1024)
    assert list(facts.architectures) == ["FlintForCausalLM"] and list(facts.eos_token_ids) == [0]
    assert facts.is_generation and not facts.supports_vision
    # What a gateway fills in where a request leaves it open.
    assert json.loads(facts.default_sampling_params_json) == {"temperature": 0.7, "top_p": 0.95, "top_k": 20}


def test_model_info_leaves_out_a_top_k_without_limit(serving):
    harness = serving(load=False)
    harness.model.generation_config = {"temperature": 0.0, "top_k": -1}
    harness.load()
    facts = harness.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5)
    assert json.loads(facts.default_sampling_params_json) == {"temperature": 0.0}


def test_server_info_and_loads(serving):
    harness = serving(num_slots=2, prefill_seconds=60)
    calls = [harness.stub.Generate(request([5], stream=True)) for _ in range(3)]
    harness.wait_for(lambda stats: stats.num_running == 2 and stats.num_waiting == 1)
    facts = harness.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=5)
    assert (facts.active_requests, facts.max_num_seqs, facts.server_type) == (3, 2, "vllm-grpc")
    assert facts.uptime_seconds > 0 and abs(facts.last_receive_timestamp - time.time()) < 10
    (load,) = harness.stub.GetLoads(pb.GetLoadsRequest(), timeout=5).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 1, 3)
    assert load.token_usage == 1.0 and load.max_running_requests == 2
    for call in calls:
        call.cancel()


def fetch_tokenizer(harness) -> tuple[list[common_pb2.GetTokenizerChunk], bytes]:
    pieces = list(harness.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=5))
    return pieces, b"".join(piece.data for piece in pieces)


def test_tokenizer_round_trip(quick, tmp_path):
    pieces, data = fetch_tokenizer(quick)
    assert pieces[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert not any(piece.sha256 for piece in pieces[:-1])
    assert fetch_tokenizer(quick)[1] == data  # the sum names the tokenizer
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "generation_config.json",
    }
    assert load_tokenizer(tmp_path).encode(SENTENCE) == quick.tokenizer.encode(SENTENCE)


def test_tokenizer_chunks_and_folder_of_its_own(serving, tmp_path):
    harness = serving(load=False)
    noise = "".join(hashlib.sha256(str(i).encode()).hexdigest() for i in range(4000))
    (tmp_path / "tokenizer.json").write_text(noise)
    harness.model.tokenizer_dir = tmp_path
    harness.load()
    assert harness.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5).tokenizer_path == str(tmp_path)
    pieces, data = fetch_tokenizer(harness)
    assert len(pieces) > 2 and max(len(piece.data) for piece in pieces) == 64 * 1024
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json").decode() == noise  # the tokenizer's folder goes first
        assert "config.json" in archive.namelist()  # the model's fills in


@pytest.mark.parametrize("whole", [True, False])
def test_tokenizer_out_of_a_gguf_file(serving, tmp_path, whole):
    """The embedded checkpoint's, with and without the tokenizer.json that its file carries."""
    source = EMBEDDED / "flint-tiny-nvfp4" / "model-nvfp4.gguf"
    metadata = gguf_metadata.read_metadata(source)
    if not whole:
        metadata = {n: v for n, v in metadata.items() if n != "tokenizer.huggingface.json"}
        metadata["tokenizer.ggml.pre"] = "qwen2"
    for name, content in gguf_metadata.tokenizer_files(metadata).items():
        (tmp_path / name).write_bytes(content)
    built, expected = load_tokenizer(tmp_path), gguf_metadata.from_metadata(metadata)
    assert built.chat_template == expected.chat_template
    assert built.template_variables == expected.template_variables
    assert built.special_tokens == expected.special_tokens
    text = f"<|user|>{SENTENCE}<think>"
    assert built.encode(text, parse_special=True) == expected.encode(text, parse_special=True)
    if whole:
        harness = serving(load=False)
        harness.model.tokenizer = load_tokenizer(source)
        harness.model.model_dir = harness.model.tokenizer_dir = source.parent
        harness.load()
        with zipfile.ZipFile(io.BytesIO(fetch_tokenizer(harness)[1])) as archive:
            names = {path.name for path in tmp_path.iterdir()} | {"config.json", "generation_config.json"}
            assert set(archive.namelist()) == names
            assert archive.read("tokenizer.json") == (EMBEDDED / "flint-tiny" / "tokenizer.json").read_bytes()


def test_missing_tokenizer_files_are_reported(serving, tmp_path):
    harness = serving(load=False)
    harness.model.model_dir = harness.model.tokenizer_dir = tmp_path
    harness.load()
    with pytest.raises(grpc.RpcError) as error:
        fetch_tokenizer(harness)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "No tokenizer files" in error.value.details()


class FakeProfiler:
    """JAX's, which keeps a profile that it cannot write."""

    def __init__(self, monkeypatch):
        self.folder, self.fault, self.gate = None, None, threading.Event()
        self.gate.set()
        monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(profiler=self))

    def start_trace(self, folder: str) -> None:
        self._check()
        assert self.folder is None
        self.folder = folder

    def stop_trace(self) -> None:
        self._check()
        (Path(self.folder) / "trace").write_text("recorded")
        self.folder = None

    def _check(self) -> None:
        self.gate.wait(10)
        if self.fault:
            raise RuntimeError(self.fault)


def start_profile(harness, folder="", **more):
    return harness.stub.StartProfile(common_pb2.StartProfileRequest(output_dir=str(folder), **more), timeout=10)


def stop_profile(harness):
    return harness.stub.StopProfile(common_pb2.StopProfileRequest(), timeout=10)


def refused_profile(call, *arguments, **more) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments, **more)
    return error.value.code(), error.value.details()


def test_profile_runs_between_start_and_stop(serving, monkeypatch, tmp_path):
    harness, _ = serving(), FakeProfiler(monkeypatch)
    folder = tmp_path / "new" / "profiles"
    assert not stop_profile(harness).success
    for _ in range(2):
        assert start_profile(harness, folder).success
        code, says = refused_profile(start_profile, harness, folder)
        assert code is grpc.StatusCode.FAILED_PRECONDITION and str(folder) in says
        stopped = stop_profile(harness)
        assert stopped.success and str(folder) in stopped.message
        assert [file.read_text() for file in folder.iterdir()] == ["recorded"]
    assert start_profile(harness).success
    assert (Path(stop_profile(harness).message.removeprefix("The profile is in ")[:-1]) / "trace").exists()
    assert refused_profile(start_profile, harness, num_steps=3)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_failed_profile_is_a_sentence_and_a_later_one_works(serving, monkeypatch, tmp_path):
    harness, profiler = serving(), FakeProfiler(monkeypatch)
    file = tmp_path / "file"
    file.touch()
    for unusable in (file, file / "below", "a\0b"):
        code, says = refused_profile(start_profile, harness, unusable)
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "cannot be written to" in says

    profiler.fault = "no tracer"
    assert refused_profile(start_profile, harness, tmp_path)[1] == "JAX cannot start a profile: no tracer"
    profiler.fault = None
    folder = tmp_path / "profiles"
    assert start_profile(harness, folder).success
    profiler.fault = "disk full"
    code, says = refused_profile(stop_profile, harness)
    assert code is grpc.StatusCode.INTERNAL and says.endswith("call StopProfile again: disk full")
    profiler.fault = None
    folder.rmdir()
    folder.touch()  # no longer a folder
    assert "cannot be copied" in refused_profile(stop_profile, harness)[1]
    assert start_profile(harness).success and stop_profile(harness).success


@pytest.mark.parametrize("call", [start_profile, stop_profile])
def test_a_profile_is_started_or_stopped_by_one_call_at_a_time(serving, monkeypatch, call):
    harness, profiler = serving(), FakeProfiler(monkeypatch)
    assert start_profile(harness).success
    profiler.gate.clear()
    stopping = harness.stub.StopProfile.future(common_pb2.StopProfileRequest(), timeout=10)
    time.sleep(0.2)
    code, says = refused_profile(call, harness)
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "at work" in says
    profiler.gate.set()
    assert stopping.result().success
    assert start_profile(harness).success and stop_profile(harness).success
