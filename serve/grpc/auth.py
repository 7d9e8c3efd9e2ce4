"""Tokens that calls must carry: the file they come from, and the interceptor that asks for them.

Kept and compared are SHA-256 sums, so that neither a comparison's time nor a dump of this object tells of a token.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health

log = logging.getLogger("serve.grpc")

MIN_TOKEN_LENGTH = 16
_HEALTH = f"/{health.SERVICE_NAME}/"  # open: load balancers ask it, and have no token
_HINT = "send the metadata 'authorization: Bearer <token>' with one of the tokens this server was given"


class TokenFile:
    """The tokens of a file, one a line; blank lines and lines that begin with # do not count.

    The file is read again once it has changed. Should it not be usable then, the tokens before stay, and one warning
    says why.

    Args:
        path: the file.

    Raises:
        ValueError: the file cannot be read, holds no token, or a line that is none; the message names the line and
            never its content.
    """

    def __init__(self, path: str):
        self._path = Path(path)
        self._stamp = self._look()
        self._sums = self._read()

    def __len__(self) -> int:
        return len(self._sums)

    def accepts(self, token: bytes) -> bool:
        """Whether this is one of the tokens now in the file. All are compared, whichever fits."""
        self._refresh()
        given = hashlib.sha256(token).digest()
        return any([hmac.compare_digest(given, known) for known in self._sums])  # a list: `any` must not stop early

    def _refresh(self) -> None:
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp  # of before the reading: what is written meanwhile is another change
        try:
            self._sums = self._read()
        except ValueError as error:
            log.warning("%s The %d tokens read before stay in force", error, len(self))
        else:
            log.info("auth_token_file has changed: %d tokens are in force", len(self))

    def _look(self) -> tuple[int, int, int] | None:
        """What tells one state of the file from another."""
        try:
            found = self._path.stat()
        except (OSError, ValueError):
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[bytes, ...]:
        try:
            content = self._path.read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"auth_token_file: {str(self._path)!r} cannot be read: {reason}.") from None
        lines = [(number, line.strip()) for number, line in enumerate(content.splitlines(), 1)]
        tokens = [(number, line) for number, line in lines if line and not line.startswith(b"#")]
        for number, token in tokens:
            if fault := _fault(token):
                raise ValueError(f"auth_token_file: line {number} of {self._path} {fault}.")
        if not tokens:
            message = f"auth_token_file: {self._path} holds no token; write one a line, for example from"
            raise ValueError(message + " `openssl rand -hex 32`.")
        return tuple({hashlib.sha256(token).digest() for _, token in tokens})


def _fault(token: bytes) -> str | None:
    if len(token) < MIN_TOKEN_LENGTH:
        return f"has {len(token)} characters; a token has at least {MIN_TOKEN_LENGTH}"
    if not all(0x21 <= byte <= 0x7E for byte in token):  # gRPC carries no others in metadata
        return "has a space, a control character or one beyond ASCII; a token has none of these"
    return None


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without a token with UNAUTHENTICATED, before anything of their message is read. The standard health
    service is open.

    Args:
        tokens: those that are accepted.
    """

    def __init__(self, tokens: TokenFile):
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's own handler, or one that refuses."""
        if handler_call_details.method.startswith(_HEALTH):
            return await continuation(handler_call_details)
        refusal = self._refusal(handler_call_details.invocation_metadata or ())
        return await continuation(handler_call_details) if refusal is None else _refusing(refusal)

    def _refusal(self, metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
        values = [value for name, value in metadata if name == "authorization"]
        if not values:
            return f"This server asks for a token: {_HINT}."
        if len(values) > 1:  # a proxy may have added its own; which of them counts is not ours to guess
            return f"There are {len(values)} authorization entries in the metadata; send one."
        value = values[0].encode() if isinstance(values[0], str) else values[0]
        scheme, _, token = value.partition(b" ")
        if scheme.lower() != b"bearer":
            return f"The authorization metadata is no Bearer token: {_HINT}."
        if not self._tokens.accepts(token.strip()):
            return f"The token is not known here: {_HINT}; it may have been replaced by a new one."
        return None


def _refusing(message: str) -> Any:  # gRPC's stubs leave handlers untyped
    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)

    # On the wire all four kinds of method are alike. This one does not wait for the message, which may be megabytes.
    return grpc.stream_stream_rpc_method_handler(refuse)
