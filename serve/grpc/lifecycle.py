"""From options to a running server to its end: loading, the ready line, signals."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, cast

from serve.grpc.auth import TokenFile
from serve.grpc.backend import Assembled
from serve.grpc.config import ServeConfig
from serve.grpc.server import Server
from serve.grpc.tls import server_credentials
from serve.metrics import Metrics, MetricsServer, serve_metrics

if TYPE_CHECKING:
    from serve.engine import Engine

log = logging.getLogger("serve.grpc")

USER_ERROR = 2
INTERRUPTED = 130
_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"

type Assemble = Callable[..., Assembled]


async def run(config: ServeConfig, assemble: Assemble | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code.

    The first signal drains: health turns NOT_SERVING, new requests are refused, running ones get `drain_seconds`.
    The second one, or the first while the model is loading, ends the process at once.

    Args:
        config: the options.
        assemble: loads the model, `serve.assemble.assemble` unless a test brings its own.

    Raises:
        ValueError, OSError: the port, the checkpoint, or a file of certificates or tokens cannot be used; the message
            is for the user.
    """
    set_memory_fraction(config.memory_fraction)
    signals = _Signals()
    credentials = server_credentials(config.tls_certificate, config.tls_key, config.tls_client_ca)
    tokens = None if config.auth_token_file is None else TokenFile(config.auth_token_file)
    server = Server(config.host, config.port, config.max_message_mb, config.services, credentials, tokens)
    await server.start()
    log.info("Listening on %s, loading the model", server.address)
    log.info("Clients need %s", _needs(config, tokens))
    try:
        loading = _in_thread(lambda: _load(config, assemble))
        first = asyncio.ensure_future(signals.first.wait())
        await asyncio.wait({loading, first}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            log.info("Stopped while loading")
            _exit_now(0)
        assembled, endpoint = loading.result()
    except BaseException:
        await server.stop()
        raise
    name = config.served_model_name or assembled.model_name
    if endpoint is not None:
        log.info("Metrics at http://%s:%d/metrics", config.host, endpoint.port)
    await server.ready(assembled, name)
    length = assembled.engine.max_model_len
    reads = ",".join(("text", *(assembled.media_format.kinds if assembled.media_format else ())))
    log.info("Offering %s for %s", ", ".join(server.service.offered), reads)
    print(f"firesteel ready: model={name} grpc={server.address} max_model_len={length} reads={reads}", flush=True)
    await first
    log.info(
        "Draining %d requests for up to %g s; signal again to stop now",
        server.service.num_active,
        config.drain_seconds,
    )
    await server.drain(config.drain_seconds)
    await server.stop()
    await asyncio.to_thread(assembled.engine.close)
    if endpoint is not None:
        await asyncio.to_thread(endpoint.close)
    return 0


def set_memory_fraction(fraction: float | None) -> None:
    """Sets and reports the part of the device memory JAX will take; it reads this once, when it starts."""
    if fraction is not None:
        os.environ[_MEMORY_FRACTION] = str(fraction)
    source = "--memory-fraction" if fraction is not None else "environment"
    if _MEMORY_FRACTION in os.environ:
        log.info("Device memory fraction: %s (%s)", os.environ[_MEMORY_FRACTION], source)
    else:
        log.info("Device memory fraction: JAX's default (0.75 on GPUs)")


def _needs(config: ServeConfig, tokens: TokenFile | None) -> str:
    """What the door asks for, for the log."""
    needs = ["TLS" if config.tls_certificate else "no TLS"]
    if config.tls_client_ca:
        needs.append("a certificate of their own")
    needs.append("no token" if tokens is None else f"one of {len(tokens)} tokens")
    return ", ".join(needs)


def _load(config: ServeConfig, assemble: Assemble | None) -> tuple[Assembled, MetricsServer | None]:
    load: Assemble = assemble or importlib.import_module("serve.assemble").assemble  # imports JAX, so not before
    assembled = load(
        config.model,
        tokenizer=config.tokenizer,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        text_only=config.text_only,
        kernels=config.kernels,
        num_draft_tokens=config.num_draft_tokens,
        num_slots=config.num_slots,
        max_queue=config.max_queue,
        compilation_cache=config.compilation_cache,
    )
    endpoint = None
    if config.metrics_port is not None:
        metrics = Metrics(config.served_model_name or assembled.model_name, cast("Engine", assembled.engine))
        endpoint = serve_metrics(metrics, config.host, config.metrics_port)
    assembled.engine.start()
    return assembled, endpoint


class _Signals:
    """Counts SIGTERM and SIGINT: the first sets `first`, the second ends the process."""

    def __init__(self):
        self.first = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        if self.first.is_set():
            log.info("Second signal: stopping now")
            _exit_now(INTERRUPTED)
        self.first.set()


def _exit_now(code: int) -> NoReturn:
    """Ends the process without waiting for threads: one may be loading a model for minutes yet."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _in_thread[Result](function: Callable[[], Result]) -> asyncio.Future[Result]:
    """Runs `function` in a daemon thread; the loop's own executor would be waited for at exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:  # handed over, whatever it is
            loop.call_soon_threadsafe(future.set_exception, error)
        else:
            loop.call_soon_threadsafe(future.set_result, result)

    threading.Thread(target=work, name="load", daemon=True).start()
    return future
