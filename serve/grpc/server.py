"""The gRPC server around the servicers: transport options, health, reflection, draining."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc, vllm_engine_pb2_grpc

from serve.grpc.auth import TokenFile, TokenInterceptor
from serve.grpc.backend import Assembled
from serve.grpc.service import Service
from serve.grpc.tokenspeed import TokenSpeedServicer
from serve.grpc.vllm import VllmEngineServicer

log = logging.getLogger("serve.grpc")

MEBIBYTE = 1024 * 1024
DEFAULT_MAX_MESSAGE_MB = 256
_WATCH_SECONDS = 0.5  # between two looks at the engine
_FLUSH_SECONDS = 2.0  # for the last messages of requests that the drain ended

FULL_NAMES = {servicer.short_name: servicer.full_name for servicer in (VllmEngineServicer, TokenSpeedServicer)}

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def server_options(max_message_mb: int = DEFAULT_MAX_MESSAGE_MB) -> list[tuple[str, int]]:
    """Transport options. Messages of either direction may have `max_message_mb` MiB.

    A client sets its own limit for what it receives (4 MiB unless it says otherwise).
    """
    return [
        ("grpc.max_receive_message_length", max_message_mb * MEBIBYTE),
        ("grpc.max_send_message_length", max_message_mb * MEBIBYTE),
        # Gateways ping while a long prefill is silent, and idle channels too. gRPC would close such connections
        # with "too many pings". Core reads the interval in this spelling only.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client whose machine vanished never closes its connection: ask, so that its requests end.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # Two servers on one port would share its connections at random instead of the second one failing.
        ("grpc.so_reuseport", 0),
    ]


class Server:
    """Listens from `start` on, and reports NOT_SERVING until `ready`.

    Args:
        host: address to listen on.
        port: TCP port; 0 for a free one.
        max_message_mb: largest message of either direction, MiB.
        services: what to offer, by the names in FULL_NAMES. None leaves it to the model: "vllm" for those that read
            text only, "tokenspeed" for the others, because gateways send sound over that one only.
        credentials: of TLS, for everything on the port; None for plain text.
        tokens: what calls must carry, those of the standard health service excepted; None for no tokens.
    """

    def __init__(
        self,
        host: str,
        port: int,
        max_message_mb: int = DEFAULT_MAX_MESSAGE_MB,
        services: tuple[str, ...] | None = None,
        credentials: grpc.ServerCredentials | None = None,
        tokens: TokenFile | None = None,
    ):
        self._host = f"[{host}]" if ":" in host else host
        self.port = port
        self.service = Service()
        self._services = services
        self._reflection = _Reflection()
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._credentials = credentials
        interceptors = () if tokens is None else (TokenInterceptor(tokens),)
        self._grpc = grpc.aio.server(interceptors=interceptors, options=server_options(max_message_mb))
        self._assembled: Assembled | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"{self._host}:{self.port}"

    async def start(self) -> None:
        """Binds the port and answers.

        Raises:
            OSError: the port cannot be had.
        """
        # Which of them are offered is known once the model is; the others then say so.
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(self.service), self._grpc)
        tokenspeed = TokenSpeedServicer(self.service)
        tokenspeed_scheduler_pb2_grpc.add_TokenSpeedSchedulerServicer_to_server(tokenspeed, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(self._reflection, self._grpc)
        await self._set_health(_NOT_SERVING, self._services or tuple(FULL_NAMES))
        try:
            if self._credentials is None:
                bound = self._grpc.add_insecure_port(self.address)
            else:
                bound = self._grpc.add_secure_port(self.address, self._credentials)
        except RuntimeError:
            bound = 0
        if bound == 0:  # older gRPC returns 0, newer raises
            message = f"Cannot listen on {self.address}: the port is taken, or the address is not this machine's."
            raise OSError(message + " Choose another --port or --host.")
        self.port = bound
        await self._grpc.start()

    async def ready(self, assembled: Assembled, served_model_name: str) -> None:
        """Serves `assembled`, whose engine has started; reports NOT_SERVING should that engine die."""
        self._assembled = assembled
        offered = self._services or (("vllm",) if assembled.media_format is None else ("tokenspeed",))
        self.service.ready(assembled, served_model_name, offered)
        self._reflection.list(offered)
        await self._set_health(_SERVING, offered)
        self._watch = asyncio.create_task(self._watch_engine(assembled))

    async def drain(self, seconds: float) -> None:
        """Reports NOT_SERVING, refuses new requests, and gives the running ones `seconds` to finish.

        Those still running then end with UNAVAILABLE. The server answers all the while; `stop` it afterwards.
        """
        self.service.drain()
        await self._health.enter_graceful_shutdown()
        if self._assembled is None:
            return
        await asyncio.to_thread(self._assembled.engine.drain, seconds)
        deadline = time.monotonic() + _FLUSH_SECONDS
        while self.service.num_active and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Closes connections at once; requests still running are cancelled, and leave the engine."""
        if self._watch is not None:
            self._watch.cancel()
        await self._grpc.stop(grace=None)

    async def _watch_engine(self, assembled: Assembled) -> None:
        while assembled.engine.is_alive:
            await asyncio.sleep(_WATCH_SECONDS)
        log.error("The engine has failed: not serving any more. Restart the server")
        self.service.engine_died()
        await self._set_health(_NOT_SERVING, self.service.offered)

    async def _set_health(
        self, status: health_pb2.HealthCheckResponse.ServingStatus, services: tuple[str, ...]
    ) -> None:
        for name in ("", *(FULL_NAMES[service] for service in services)):
            await self._health.set(name, status)


class _Reflection(reflection_pb2_grpc.ServerReflectionServicer):
    """Lists the services that are offered, as soon as that is known."""

    def __init__(self):
        self.list(())

    def list(self, services: tuple[str, ...]) -> None:
        names = (*(FULL_NAMES[service] for service in services), health.SERVICE_NAME, reflection.SERVICE_NAME)
        self._listing = reflection.aio.ReflectionServicer(names)  # pyright: ignore[reportAttributeAccessIssue]

    async def ServerReflectionInfo(self, request_iterator, context):
        answers = self._listing.ServerReflectionInfo(request_iterator, context)
        async for answer in answers:  # pyright: ignore[reportGeneralTypeIssues]  typed as a coroutine
            yield answer
