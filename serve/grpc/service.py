"""Generation calls, whatever their protocol: from a request to the engine, and its outputs back.

A call that ends, however it ends, takes its sequences out of the engine: Abort, cancellation, a deadline and a broken
connection all lead to the `finally` of `generate`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence

import grpc

from serve.grpc.backend import Assembled, Engine, Tokenizer
from serve.grpc.choice import Choice, Piece
from serve.grpc.errors import Refusal
from serve.grpc.mailbox import Mailbox
from serve.grpc.media import MediaInput, placed
from serve.grpc.pace import Pace
from serve.grpc.profile import Profiler
from serve.grpc.sampling import Wanted, seeded
from serve.grpc.stops import TokenStops
from serve.request import EngineBusy, EngineClosed, InvalidRequest, Media, Output, Request, SamplingParams
from serve.text.detokenize import IncrementalDetokenizer
from serve.text.stop import StopStrings

ENGINE_DIED = "This server's engine has failed; send the request to another server, and restart this one."
DRAINING = "This server is shutting down; send the request to another one."
_CONTEXT_TOKENS = 64  # encoded ahead of a prompt's kept end, which depends on them where the text is cut
_ABORTED_EARLY = "The request was aborted before it started."


@dataclasses.dataclass(frozen=True)
class Ask:
    """A Generate call.

    Attributes:
        request_id: the client's; empty for none.
        prompt: token ids, or text; None if the client sent neither.
        media: the pictures and clips that came with it, not decoded yet.
    """

    request_id: str
    prompt: Sequence[int] | str | None
    sampling: SamplingParams
    wanted: Wanted
    stream: bool
    media: Sequence[MediaInput] = ()


@dataclasses.dataclass
class _Call:
    """One Generate call. `engine_ids` are its sequences in the engine, by index."""

    mailbox: Mailbox = dataclasses.field(default_factory=Mailbox)
    engine_ids: list[str] = dataclasses.field(default_factory=list)
    aborted: bool = False


class Service:
    """The model and the calls under way, shared by all servicers. Refuses with UNAVAILABLE until `ready`, and new
    calls after `drain`.

    Attributes:
        offered: the services to answer, by their short names; known once the model is.
        served_model_name: what clients call it.
        started_at: `time.monotonic()`; last_receive: Unix time of the last Generate call.
    """

    def __init__(self):
        self.offered: tuple[str, ...] = ()
        self.served_model_name = ""
        self.started_at = time.monotonic()
        self.last_receive = 0.0
        self.profiler = Profiler()
        self.draining = False
        self._assembled: Assembled | None = None
        self._calls: dict[str, _Call] = {}
        self._serial = itertools.count()
        self._pace = Pace()

    def ready(self, assembled: Assembled, served_model_name: str, offered: tuple[str, ...]) -> None:
        """The model is loaded, and its engine has started."""
        self._assembled, self.served_model_name, self.offered = assembled, served_model_name, offered

    def drain(self) -> None:
        """Refuses new requests from here on."""
        self.draining = True

    def engine_died(self) -> None:
        """Ends the calls under way with UNAVAILABLE: nobody else will."""
        for call in self._calls.values():
            for index, engine_id in enumerate(call.engine_ids):
                call.mailbox.put(index, Output(engine_id, finish_reason="error"))

    @property
    def num_active(self) -> int:
        """Generate calls under way."""
        return len(self._calls)

    def loaded(self) -> Assembled:
        """The model.

        Raises:
            EngineClosed: it is not there yet.
        """
        if self._assembled is None:
            raise EngineClosed("The model is still loading; wait until grpc.health.v1 reports SERVING.")
        return self._assembled

    def accepting(self) -> Assembled:
        """The model, for a new call.

        Raises:
            EngineClosed: it is not there yet, the server is ending, or the engine is dead.
        """
        self.last_receive = time.time()
        assembled = self.loaded()
        if self.draining:
            raise EngineClosed(DRAINING)
        if not assembled.engine.is_alive:
            raise EngineClosed(ENGINE_DIED)
        return assembled

    async def generate(self, ask: Ask, send: Callable[[Piece], Awaitable[None]]) -> None:
        """Continues one prompt, n times, and sends what comes. Streamed: chunks of new tokens, then one completing
        piece an index.

        Raises:
            InvalidRequest, EngineClosed, Refusal: it is not served; the message is for the client.
        """
        assembled = self.loaded()
        request_id = ask.request_id or uuid.uuid4().hex
        if request_id in self._calls:
            message = f"A request with id {request_id!r} is running; give every request its own id."
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, message)
        call = self._calls[request_id] = _Call()
        try:
            await self._generate(ask, request_id, call, assembled, send)
        finally:
            del self._calls[request_id]
            for engine_id in call.engine_ids:
                assembled.engine.abort(engine_id)  # those that finished are unknown to it by now

    def abort(self, request_id: str) -> bool:
        """Ends a call; it completes with finish_reason "abort". False if there is none of this id."""
        call = self._calls.get(request_id)
        if call is None:
            return False
        call.aborted = True
        for engine_id in call.engine_ids:
            self.loaded().engine.abort(engine_id)
        return True

    async def _generate(
        self,
        ask: Ask,
        request_id: str,
        call: _Call,
        assembled: Assembled,
        send: Callable[[Piece], Awaitable[None]],
    ) -> None:
        stop = StopStrings(ask.wanted.stop) if ask.wanted.stop else None
        prompt = await _prompt(ask, assembled)
        media: tuple[Media, ...] = ()
        if ask.media or assembled.media_format is not None:  # in a thread: pictures are megabytes to check and to hash
            prompt, media = await asyncio.to_thread(placed, prompt, ask.media, assembled.media_format)
        if call.aborted:
            raise Refusal(grpc.StatusCode.CANCELLED, _ABORTED_EARLY)
        await self._submit(request_id, call, Request("", prompt, ask.sampling, media), ask.wanted.n, assembled.engine)
        choices = [
            Choice(
                index,
                stream=ask.stream,
                prompt_token_ids=prompt,
                stops=_stops(stop, ask, assembled),
                keep_stop_token=ask.wanted.keep_stop_token,
            )
            for index in range(ask.wanted.n)
        ]
        with self._pace.running(ask.wanted.n):
            await _deliver(call, choices, assembled.engine, send)

    async def _submit(self, request_id: str, call: _Call, request: Request, n: int, engine: Engine) -> None:
        # The serial keeps the engine's ids apart when a client uses one again at once: the engine may still be
        # taking out the sequence that a stop string ended.
        serial = next(self._serial)
        for index in range(n):
            engine_id = f"{request_id}/{serial}/{index}"
            sampling = seeded(request.sampling, index)
            sequence = dataclasses.replace(request, request_id=engine_id, sampling=sampling)
            try:
                engine.submit(sequence, functools.partial(call.mailbox.put, index))
            except EngineBusy as error:
                wait = self._pace.retry_after_s(engine.stats().num_waiting)
                raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), wait) from error
            call.engine_ids.append(engine_id)
            await asyncio.sleep(0)  # the engine has read the whole prompt: other calls' turn
            if call.aborted:
                raise Refusal(grpc.StatusCode.CANCELLED, _ABORTED_EARLY)


async def _deliver(
    call: _Call, choices: Sequence[Choice], engine: Engine, send: Callable[[Piece], Awaitable[None]]
) -> None:
    """Sends what the engine puts out, until every choice is finished."""
    while not all(choice.finished for choice in choices):
        for index, output in await call.mailbox.get():
            choice = choices[index]
            if choice.finished:  # by a stop string; the engine's own end follows
                continue
            _check_ended_by_server(output, call, engine)
            pieces = choice.advance(output)
            if choice.stopped_by is not None:
                engine.abort(call.engine_ids[index], "stop")
            for piece in pieces:
                await send(piece)


async def _prompt(ask: Ask, assembled: Assembled) -> tuple[int, ...]:
    """The prompt's tokens, truncated as asked. Lengths are checked here, before millions of ids are copied."""
    limit = assembled.engine.max_model_len
    keep = ask.wanted.truncate_prompt_tokens
    if keep == -1:
        keep = max(limit - (ask.sampling.max_tokens or 1), 1)
    if keep is not None and ask.media:
        raise InvalidRequest("A prompt with pictures or sound is not truncated; leave truncate_prompt_tokens out.")
    match ask.prompt:
        case str():  # in a thread: a long text takes a while, and other streams go on
            ids = await asyncio.to_thread(_encode, ask.prompt, keep, limit, assembled.tokenizer)
        case None:
            raise InvalidRequest("The request has no prompt; set tokenized or text.")
        case _:
            ids = ask.prompt
    if not ids:
        raise InvalidRequest("The prompt is empty; it needs at least one token.")
    if keep is not None:
        ids = ids[-keep:]
    if len(ids) >= limit:
        message = f"The prompt has {len(ids)} tokens; at most {limit - 1} fit, and one for the output."
        raise InvalidRequest(message + " Shorten it, or set truncate_prompt_tokens.")
    return tuple(ids)


def _encode(text: str, keep: int | None, limit: int, tokenizer: Tokenizer) -> list[int]:
    """A raw completion prompt: special tokens count, and the model's prefix goes in front unless it is there.

    Text that has too many tokens, whichever they are, is not encoded: cut to an end that holds the last `keep` for
    sure, or refused.
    """
    longest = tokenizer.max_token_bytes
    if keep is not None and keep < limit:
        text = text[-(keep + _CONTEXT_TOKENS) * longest :]
    elif len(text) * 4 > limit * longest and (size := len(text.encode())) > limit * longest:
        message = f"The prompt cannot fit: it has {size} bytes, and {limit} tokens of at most {longest} bytes each"
        raise InvalidRequest(message + " are fewer. Shorten it, or set truncate_prompt_tokens.")
    ids = list(tokenizer.encode(text, parse_special=True))
    prefix = list(tokenizer.prefix_ids)
    return ids if not ids or ids[: len(prefix)] == prefix else prefix + ids


def _stops(stop: StopStrings | None, ask: Ask, assembled: Assembled) -> TokenStops | None:
    if stop is None:
        return None
    return TokenStops(
        IncrementalDetokenizer(assembled.tokenizer, skip_special_tokens=ask.wanted.skip_special_tokens),
        stop.fresh(),
        include_stop=ask.wanted.include_stop,
        min_tokens=ask.sampling.min_tokens,
    )


def _check_ended_by_server(output: Output, call: _Call, engine: Engine) -> None:
    """An end nobody asked for is no answer: the client may send the request to another server."""
    if output.finish_reason == "error" and not engine.is_alive:
        raise EngineClosed(ENGINE_DIED)
    if output.finish_reason == "abort" and not call.aborted:
        raise EngineClosed("This server is shutting down and did not finish the request; send it again.")
