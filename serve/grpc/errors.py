"""Exceptions to gRPC statuses: a request that is not served ends with a status and a sentence, never a message."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import grpc

from serve.request import EngineClosed, InvalidRequest

_STATUS = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    EngineClosed: grpc.StatusCode.UNAVAILABLE,
}


class Refusal(Exception):
    """A request ends with this status; the message says what to change.

    Args:
        status: how the call ends.
        message: a sentence for the client.
        retry_after_s: seconds after which the same request may succeed; None if it will not by waiting.
    """

    def __init__(self, status: grpc.StatusCode, message: str, retry_after_s: float | None = None):
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


REFUSALS = (Refusal, *_STATUS)


async def abort_with(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """Ends the RPC with the status of `error`, one of `REFUSALS`.

    One that waiting may cure carries `grpc-retry-pushback-ms`, which gRPC clients with a retry policy obey by
    themselves.
    """
    trailers = ()
    if isinstance(error, Refusal):
        status = error.status
        if error.retry_after_s is not None:
            trailers = (("grpc-retry-pushback-ms", str(round(error.retry_after_s * 1000))),)
    else:
        status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
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
