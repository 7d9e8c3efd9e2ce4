"""`python -m serve.grpc` as a process: options, the ready line, exit codes, signals."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_harness import request, write_tokenizer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from serve.grpc.config import ServeConfig, parse

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    env = os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=30)


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path)
    return tmp_path


@contextlib.contextmanager
def process(folder: Path, *options: str, **engine):
    """A server process with the stub engine; killed if it still runs at the end."""
    (folder / "engine.json").write_text(json.dumps(engine))
    command = [sys.executable, str(HERE / "stub_server.py"), str(folder), "--port", "0", *options]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        yield server
    finally:
        server.kill()
        server.communicate()


def ready(server: subprocess.Popen) -> pb_grpc.VllmEngineStub:
    line = server.stdout.readline()
    match = re.fullmatch(r"firesteel ready: model=\S+ grpc=(127\.0\.0\.1:\d+) max_model_len=\d+ reads=text\n", line)
    assert match, line + server.stderr.read()
    return pb_grpc.VllmEngineStub(grpc.insecure_channel(match[1]))


def test_jx09_help_imports_no_jax():
    code = (
        "import sys\n"
        "from serve.grpc.__main__ import main\n"
        "try:\n    main(['--help'])\n"
        "finally:\n    print(sorted({m.split('.')[0] for m in sys.modules} & {'jax', 'jaxlib', 'flax', 'modeling'}))"
    )
    answer = run("-c", code)
    assert answer.returncode == 0
    assert answer.stdout.endswith("[]\n")
    assert "--max-model-len" in answer.stdout and "--config" in answer.stdout


def test_ready_line_is_all_of_stdout_and_sigterm_drains(folder):
    with process(folder, "--served-model-name", "flint-x", "--drain-seconds", "10", step_seconds=0.01) as server:
        stub = ready(server)
        assert stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5).served_model_name == "flint-x"
        call = stub.Generate(request([5, 6], stream=True, max_tokens=60))
        next(call)
        server.send_signal(signal.SIGTERM)
        assert list(call)[-1].complete.completion_tokens == 60
        assert server.wait(5) == 0
        assert server.stdout.read() == ""


def test_second_signal_stops_at_once(folder):
    with process(folder, "--drain-seconds", "60", prefill_seconds=60) as server:
        stub = ready(server)
        call = stub.Generate(request([5], stream=True))
        while not stub.GetLoads(pb.GetLoadsRequest()).loads[0].num_running_reqs:
            time.sleep(0.01)
        server.send_signal(signal.SIGINT)
        while stub.HealthCheck(pb.HealthCheckRequest()).healthy:
            time.sleep(0.01)
        assert server.poll() is None
        server.send_signal(signal.SIGINT)
        assert server.wait(2) == 130
        with pytest.raises(grpc.RpcError):
            list(call)


def test_gr08_not_serving_while_loading_and_a_signal_ends_it(folder):
    with process(folder, load_seconds=60) as server:
        address = None
        while address is None:
            match = re.search(r"Listening on (\S+),", server.stderr.readline())
            address = match and match[1]
        health = health_pb2_grpc.HealthStub(grpc.insecure_channel(address))
        status = health.Check(health_pb2.HealthCheckRequest(), timeout=5).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        server.send_signal(signal.SIGTERM)
        assert server.wait(2) == 0


@pytest.mark.parametrize("error", ["ValueError", "FileNotFoundError"])
def test_unusable_checkpoint_is_one_sentence_and_exit_code_2(folder, error):
    with process(folder, load_error=error) as server:
        out, err = server.communicate(timeout=20)
        assert (server.returncode, out) == (2, "")
        assert err.splitlines()[-1] == f"error: cannot load {folder}" and "Traceback" not in err


def test_a_bug_while_loading_keeps_its_traceback(folder):
    with process(folder, load_error="bug") as server:
        _, err = server.communicate(timeout=20)
        assert server.returncode == 1 and "Traceback" in err and "RuntimeError: a bug" in err


def test_taken_port_is_exit_code_2():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        answer = run("-m", "serve.grpc", "--port", str(taken.getsockname()[1]))
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "port is taken" in answer.stderr.splitlines()[-1] and "Traceback" not in answer.stderr


def test_bad_options_are_exit_code_2(tmp_path):
    for arguments in (["--no-such-option", "1"], ["--port", "x"], ["--config", str(tmp_path / "none.yaml")]):
        answer = run("-m", "serve.grpc", *arguments)
        assert (answer.returncode, answer.stdout) == (2, ""), arguments
        assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("options", "environment", "report"),
    [
        (["--memory-fraction", "0.3"], {}, "Device memory fraction: 0.3 (--memory-fraction)"),
        ([], {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}, "Device memory fraction: 0.4 (environment)"),
    ],
)
def test_jx08_memory_fraction_is_set_before_jax_and_reported(folder, monkeypatch, options, environment, report):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    code = (
        "import os, sys\n"
        "from serve.grpc.__main__ import main\n"
        "def assemble(*_, **__):\n"
        "    raise ValueError(os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'] + str('jax' in sys.modules))\n"
        "sys.exit(main(['--port', '0', *sys.argv[1:]], assemble))"
    )
    answer = run("-c", code, *options, **environment)
    assert report in answer.stderr
    assert answer.stderr.splitlines()[-1] == f"error: {report.split()[3]}False"


@pytest.mark.parametrize("options, kernels", [([], "auto"), (["--kernels", "plain"], "plain")])
def test_the_engine_is_told_of_kernels(options, kernels):
    """What it refuses ends the server as any unusable option does."""
    code = (
        "import sys\n"
        "from serve.grpc.__main__ import main\n"
        "def assemble(*_, **options):\n"
        "    raise ValueError('kernels=' + options['kernels'])\n"
        "sys.exit(main(['--port', '0', *sys.argv[1:]], assemble))"
    )
    answer = run("-c", code, *options)
    assert (answer.returncode, answer.stderr.splitlines()[-1]) == (2, f"error: kernels={kernels}")


def test_command_line_goes_over_the_file(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("port: 7000\nnum_slots: 3\nmemory_fraction: 1\ndrain_seconds: 5\n")
    config = parse(["--config", str(path), "--num-slots", "4"])
    expected = ServeConfig(config=str(path), port=7000, num_slots=4, memory_fraction=1, drain_seconds=5)
    assert config == expected
    assert parse([]) == ServeConfig()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "unknown option 'prot' (did you mean 'port'?)"),
        ("config: other.yaml", "unknown option 'config'"),
        ("port: '50051'", "port: Input should be a valid integer, got '50051'"),
        ("dtype: float16", "dtype: "),
        ("kernels: triton", "kernels: Input should be 'auto', 'pallas' or 'plain', got 'triton'"),
        ("port: 70000", "port is 70000; it must be 0 to 65535"),
        ("memory_fraction: 0", "memory_fraction is 0"),
        ("num_slots: 0", "num_slots is 0; it must be 1 to 1024"),
        ("num_slots: 1025", "num_slots is 1025"),
        ("max_queue: 1000001", "max_queue is 1000001; it must be 0 to 1000000"),
        ("max_model_len: 2147483648", "max_model_len is 2147483648"),
        ("drain_seconds: 86401", "drain_seconds is 86401"),
        ("drain_seconds: 1.0e+400", "drain_seconds"),
        ("- port", "not a list"),
        ("port: [", "is not YAML"),
    ],
)
def test_bad_configuration_is_named(tmp_path, text, says):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)):
        parse(["--config", str(path)])


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1"])
def test_the_time_to_drain_is_finite(seconds):
    with pytest.raises(ValueError, match=r"drain_seconds is .*; it must be 0 to 86400"):
        parse([f"--drain-seconds={seconds}"])


def test_services_are_named_on_the_command_line_or_in_the_file(tmp_path):
    (path := tmp_path / "run.yaml").write_text("services: [tokenspeed]\n")
    assert parse(["--config", str(path)]).services == ("tokenspeed",)
    assert parse(["--config", str(path), "--services", "vllm", "tokenspeed"]).services == ("vllm", "tokenspeed")
    assert parse([]).services is None
    path.write_text("services: [triton]\n")
    with pytest.raises(ValueError, match=r"services.*'vllm' or 'tokenspeed'"):
        parse(["--config", str(path)])
    for given in (["--services"], ["--services", "vllm", "vllm"]):
        with pytest.raises(ValueError, match="name each protocol once"):
            parse(given)
