"""smg, the OpenAI-compatible gateway, started in front of a server; the openai client in front of smg."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


@contextlib.contextmanager
def gateway(address: str, model: str, log: Path, *options: str) -> Iterator[openai.OpenAI]:
    """An openai client of a gateway that knows nothing but the server's address and `options`."""
    port, metrics_port = free_ports(2)
    command = [str(Path(sys.executable).parent / "smg"), "launch", "--worker-urls", f"grpc://{address}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-retries", *options]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"HF_HUB_OFFLINE": "1"}) as process,
    ):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=30)
        try:
            wait_for_model(client, model, process, log)
            yield client
        finally:
            client.close()
            process.kill()


def wait_for_model(client: openai.OpenAI, model: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(openai.OpenAIError):
            if any(listed.id == model for listed in client.models.list().data):
                # The tokenizer comes after the worker is listed.
                client.completions.create(model=model, prompt="A", max_tokens=1)
                return
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.1)
