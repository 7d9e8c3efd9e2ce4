"""What the services of all protocols answer alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import grpc
from smg_grpc_proto.generated import common_pb2

from serve.grpc import bundle, info
from serve.grpc.backend import Assembled
from serve.grpc.errors import REFUSALS, Refusal, abort_with, refused, with_status
from serve.grpc.service import DRAINING, ENGINE_DIED, Service
from serve.request import InvalidRequest


class Servicer:
    """Base of the servicers. Their messages are named alike in all protocols; `pb` is the module that has them.

    Attributes:
        short_name: what `--services` calls it.
        full_name: what gRPC calls it.
    """

    short_name: ClassVar[str]
    full_name: ClassVar[str]
    pb: ClassVar[Any]

    def __init__(self, service: Service):
        self._service = service

    def _loaded(self) -> Assembled:
        """The model, if this service is to be answered for it."""
        assembled = self._service.loaded()
        if self.short_name not in self._service.offered:
            offered = ", ".join(self._service.offered)
            message = f"This server offers {offered} only; start it with --services {self.short_name} for this one."
            raise Refusal(grpc.StatusCode.UNIMPLEMENTED, message)
        return assembled

    @with_status
    async def HealthCheck(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Whether requests are served now.

        UNAVAILABLE while the model loads: a gateway takes any answer for a worker that can be asked for its model, and
        would keep one that cannot say its name.
        """
        assembled = self._loaded()
        if self._service.draining:
            return self.pb.HealthCheckResponse(healthy=False, message=DRAINING)
        if not assembled.engine.is_alive:
            return self.pb.HealthCheckResponse(healthy=False, message=ENGINE_DIED)
        return self.pb.HealthCheckResponse(healthy=True, message="Ready.")

    @with_status
    async def GetLoads(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Running and waiting requests, and the share of the cache in use."""
        return info.loads(self._loaded().engine.stats(), self.pb)

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The tokenizer's files as one zip, in chunks; SHA-256 on the last."""
        try:
            assembled = self._loaded()
            folders = (assembled.tokenizer_dir, assembled.model_dir)
            data = await asyncio.to_thread(bundle.tokenizer_zip, folders, assembled.tokenizer.source)
        except REFUSALS as error:
            await abort_with(context, error)
        except OSError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"The tokenizer cannot be sent: {error}")
        for chunk in bundle.chunks(data):
            yield chunk

    @with_status
    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ProfileResponse:
        """Records a JAX profile from now to StopProfile, in `output_dir` or a new temporary folder."""
        self._loaded()
        if request.HasField("start_step") or request.HasField("num_steps"):
            raise InvalidRequest("Profiles run from StartProfile to StopProfile; leave start_step and num_steps out.")
        folder = await asyncio.to_thread(self._service.profiler.start, request.output_dir)
        return common_pb2.ProfileResponse(success=True, message=f"Profiling to {folder}.")

    @with_status
    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ProfileResponse:
        """Writes the profile."""
        folder = await asyncio.to_thread(self._service.profiler.stop)
        if folder is None:
            return common_pb2.ProfileResponse(success=False, message="No profile is running; call StartProfile first.")
        return common_pb2.ProfileResponse(success=True, message=f"The profile is in {folder}.")

    FlushCache = refused(grpc.StatusCode.UNIMPLEMENTED, "This server has no prefix cache to flush.")
    SubscribeKvEvents = refused(grpc.StatusCode.UNIMPLEMENTED, "This server publishes no KV-cache events.")
