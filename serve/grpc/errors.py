"""Exceptions to gRPC statuses: a request that is not served ends with a status and a sentence, never a message."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import grpc

from serve.request import EngineBusy, EngineClosed, InvalidRequest

RETRY_AFTER_MS = 1000

_STATUS = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    EngineBusy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    EngineClosed: grpc.StatusCode.UNAVAILABLE,
}


class Refusal(Exception):
    """A request ends with this status; the message says what to change."""

    def __init__(self, status: grpc.StatusCode, message: str):
        super().__init__(message)
        self.status = status


REFUSALS = (Refusal, *_STATUS)


async def abort_with(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """Ends the RPC with the status of `error`, one of `REFUSALS`.

    A full queue carries `grpc-retry-pushback-ms`, which gRPC clients with a retry policy obey by themselves.
    """
    if isinstance(error, Refusal):
        status = error.status
    else:
        status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
    busy = status is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = (("grpc-retry-pushback-ms", str(RETRY_AFTER_MS)),) if busy else ()
    await context.abort(status, str(error), trailers)
    raise AssertionError("context.abort returned")


def with_status(handler: Any) -> Any:  # the generated base classes are untyped
    """Ends a unary RPC, or one that writes its stream itself, with the status of the exception its handler raises."""

    @functools.wraps(handler)
    async def wrapped(self, request, context):
        try:
            return await handler(self, request, context)
        except REFUSALS as error:
            await abort_with(context, error)

    return wrapped


def refused(status: grpc.StatusCode, message: str) -> Any:
    """A handler that always ends with this status."""

    async def handler(self, request, context):
        await context.abort(status, message)

    return handler
