"""The service `vllm.grpc.engine.VllmEngine`: what the smg gateway and other clients of vLLM's gRPC face call.

Token ids in and out; text prompts are taken too, as raw completion prompts in which special tokens are recognised.
Not served: embeddings, KV-cache events, constrained output, images, disaggregated prefill. Asking for them is an
error with a sentence, never ignored.

A call that ends, however it ends, takes its sequences out of the engine: Abort, cancellation, a deadline and a broken
connection all lead to the `finally` of `_generate`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serve.grpc import bundle, info
from serve.grpc.backend import Assembled, Engine, Tokenizer
from serve.grpc.choice import Choice
from serve.grpc.errors import REFUSALS, Refusal, abort_with
from serve.grpc.mailbox import Mailbox
from serve.grpc.profile import Profiler
from serve.grpc.sampling import Wanted, request_sampling, seeded
from serve.grpc.stops import TokenStops
from serve.request import EngineClosed, InvalidRequest, Output, Request, SamplingParams
from serve.text.detokenize import IncrementalDetokenizer
from serve.text.stop import StopStrings

_ENGINE_DIED = "This server's engine has failed; send the request to another server, and restart this one."
_CONTEXT_TOKENS = 64  # encoded ahead of a prompt's kept end, which depends on them where the text is cut
_ABORTED_EARLY = "The request was aborted before it started."

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name


def _with_status(handler: Any) -> Any:  # the generated base class is untyped
    """Ends the RPC with the status of the exception its handler raises."""

    @functools.wraps(handler)
    async def wrapped(self, request, context):
        try:
            return await handler(self, request, context)
        except REFUSALS as error:
            await abort_with(context, error)

    return wrapped


def _refused(status: grpc.StatusCode, message: str) -> Any:
    async def handler(self, request, context):
        await context.abort(status, message)

    return handler


@dataclasses.dataclass
class _Call:
    """One Generate call. `engine_ids` are its sequences in the engine, by index."""

    mailbox: Mailbox = dataclasses.field(default_factory=Mailbox)
    engine_ids: list[str] = dataclasses.field(default_factory=list)
    aborted: bool = False


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Answers UNAVAILABLE until `ready`, and to new requests after `drain`."""

    def __init__(self):
        self._assembled: Assembled | None = None
        self._served_model_name = ""
        self._draining = False
        self._calls: dict[str, _Call] = {}
        self._serial = itertools.count()
        self._started_at = time.monotonic()
        self._last_receive = 0.0
        self._profiler = Profiler()

    def ready(self, assembled: Assembled, served_model_name: str) -> None:
        """The model is loaded, and its engine has started."""
        self._assembled, self._served_model_name = assembled, served_model_name

    def drain(self) -> None:
        """Refuses new requests from here on."""
        self._draining = True

    def engine_died(self) -> None:
        """Ends the calls under way with UNAVAILABLE: nobody else will."""
        for call in self._calls.values():
            for index, engine_id in enumerate(call.engine_ids):
                call.mailbox.put(index, Output(engine_id, finish_reason="error"))

    @property
    def num_active(self) -> int:
        """Generate calls under way."""
        return len(self._calls)

    # ---- Generate ----------------------------------------------------------------------------------------------

    @_with_status
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Continues one prompt, n times. Streamed: chunks of new tokens, then one `complete` an index."""
        self._last_receive = time.time()
        assembled = self._loaded()
        if self._draining:
            raise EngineClosed("This server is shutting down; send the request to another one.")
        if not assembled.engine.is_alive:
            raise EngineClosed(_ENGINE_DIED)
        _refuse_unsupported(request)
        request_id = request.request_id or uuid.uuid4().hex
        if request_id in self._calls:
            message = f"A request with id {request_id!r} is running; give every request its own id."
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, message)
        call = self._calls[request_id] = _Call()
        try:
            await self._generate(request, request_id, call, assembled, context)
        finally:
            del self._calls[request_id]
            for engine_id in call.engine_ids:
                assembled.engine.abort(engine_id)  # those that finished are unknown to it by now

    async def _generate(
        self,
        request: pb.GenerateRequest,
        request_id: str,
        call: _Call,
        assembled: Assembled,
        context: grpc.aio.ServicerContext,
    ) -> None:
        sampling, wanted = request_sampling(request, assembled.generation_config)
        stop = StopStrings(wanted.stop) if wanted.stop else None
        prompt = await _prompt(request, sampling, wanted, assembled)
        if call.aborted:
            raise Refusal(grpc.StatusCode.CANCELLED, _ABORTED_EARLY)
        await self._submit(request_id, call, prompt, sampling, wanted.n, assembled.engine)
        choices = [
            Choice(
                index,
                stream=request.stream,
                prompt_token_ids=prompt,
                stops=_stops(stop, wanted, sampling, assembled),
            )
            for index in range(wanted.n)
        ]
        while not all(choice.finished for choice in choices):
            for index, output in await call.mailbox.get():
                choice = choices[index]
                if choice.finished:  # by a stop string; the engine's own end follows
                    continue
                _check_ended_by_server(output, call, assembled.engine)
                if output.prompt_logprobs is None:
                    messages = choice.advance(output)
                else:  # a long prompt's take a second to convert; other streams go on
                    messages = await asyncio.to_thread(choice.advance, output)
                if choice.stopped_by is not None:
                    assembled.engine.abort(call.engine_ids[index])
                for message in messages:
                    await context.write(message)

    async def _submit(
        self,
        request_id: str,
        call: _Call,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        n: int,
        engine: Engine,
    ) -> None:
        # The serial keeps the engine's ids apart when a client uses one again at once: the engine may still be
        # taking out the sequence that a stop string ended.
        serial = next(self._serial)
        for index in range(n):
            engine_id = f"{request_id}/{serial}/{index}"
            engine_request = Request(engine_id, prompt, seeded(sampling, index))
            engine.submit(engine_request, functools.partial(call.mailbox.put, index))
            call.engine_ids.append(engine_id)
            await asyncio.sleep(0)  # the engine has read the whole prompt: other calls' turn
            if call.aborted:
                raise Refusal(grpc.StatusCode.CANCELLED, _ABORTED_EARLY)

    @_with_status
    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Ends requests; their calls get `complete` with finish_reason "abort". Unknown ids are no error."""
        engine = self._loaded().engine
        for request_id in request.request_ids:
            call = self._calls.get(request_id)
            if call is None:
                continue
            call.aborted = True
            for engine_id in call.engine_ids:
                engine.abort(engine_id)
        return pb.AbortResponse()

    # ---- About the server --------------------------------------------------------------------------------------

    @_with_status
    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        """Whether requests are served now.

        UNAVAILABLE while the model loads: a gateway takes any answer for a worker that can be asked for its model, and
        would keep one that cannot say its name.
        """
        assembled = self._loaded()
        if self._draining:
            return pb.HealthCheckResponse(healthy=False, message="The server is shutting down.")
        if not assembled.engine.is_alive:
            return pb.HealthCheckResponse(healthy=False, message=_ENGINE_DIED)
        return pb.HealthCheckResponse(healthy=True, message="Ready.")

    @_with_status
    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """Names, sizes, end tokens, and the sampling defaults a gateway should apply."""
        return info.model_info(self._loaded(), self._served_model_name)

    @_with_status
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """Uptime and capacity."""
        return info.server_info(
            self._loaded().engine.stats(),
            active=self.num_active,
            uptime=time.monotonic() - self._started_at,
            last_receive=self._last_receive,
        )

    @_with_status
    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        """Running and waiting requests, and the share of the cache in use."""
        return info.loads(self._loaded().engine.stats())

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The tokenizer's files as one zip, in chunks; SHA-256 on the last."""
        try:
            assembled = self._loaded()
            folders = (assembled.tokenizer_dir, assembled.model_dir)
            data = await asyncio.to_thread(bundle.tokenizer_zip, folders, assembled.tokenizer.source)
        except EngineClosed as error:
            await abort_with(context, error)
        except OSError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"The tokenizer cannot be sent: {error}")
        for chunk in bundle.chunks(data):
            yield chunk

    @_with_status
    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ProfileResponse:
        """Records a JAX profile from now to StopProfile, in `output_dir` or a new temporary folder."""
        self._loaded()
        if request.HasField("start_step") or request.HasField("num_steps"):
            raise InvalidRequest("Profiles run from StartProfile to StopProfile; leave start_step and num_steps out.")
        folder = await asyncio.to_thread(self._profiler.start, request.output_dir)
        return common_pb2.ProfileResponse(success=True, message=f"Profiling to {folder}.")

    @_with_status
    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ProfileResponse:
        """Writes the profile."""
        folder = await asyncio.to_thread(self._profiler.stop)
        if folder is None:
            return common_pb2.ProfileResponse(success=False, message="No profile is running; call StartProfile first.")
        return common_pb2.ProfileResponse(success=True, message=f"The profile is in {folder}.")

    Embed = _refused(grpc.StatusCode.UNIMPLEMENTED, "This server generates text; it has no embeddings.")
    FlushCache = _refused(grpc.StatusCode.UNIMPLEMENTED, "This server has no prefix cache to flush.")
    SubscribeKvEvents = _refused(grpc.StatusCode.UNIMPLEMENTED, "This server publishes no KV-cache events.")

    def _loaded(self) -> Assembled:
        if self._assembled is None:
            raise EngineClosed("The model is still loading; wait until grpc.health.v1 reports SERVING.")
        return self._assembled


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    if request.HasField("mm_inputs") or request.extra_mm_inputs or request.HasField("media_refs"):
        message = "This model reads text only; leave images, audio and video out."
        raise Refusal(grpc.StatusCode.UNIMPLEMENTED, message)
    if request.HasField("kv_transfer_params") or request.HasField("kv_transfer_params_json"):
        message = "This server does prefill and decode itself; leave kv_transfer_params out."
        raise Refusal(grpc.StatusCode.UNIMPLEMENTED, message)
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        raise InvalidRequest(f"data_parallel_rank is {request.data_parallel_rank}; this server has one rank, 0.")


async def _prompt(
    request: pb.GenerateRequest, sampling: SamplingParams, wanted: Wanted, assembled: Assembled
) -> tuple[int, ...]:
    """The prompt's tokens, truncated as asked. Lengths are checked here, before millions of ids are copied."""
    limit = assembled.engine.max_model_len
    keep = wanted.truncate_prompt_tokens
    if keep == -1:
        keep = max(limit - (sampling.max_tokens or 1), 1)
    match request.WhichOneof("input"):
        case "tokenized":
            ids = request.tokenized.input_ids
        case "text":  # in a thread: a long text takes a while, and other streams go on
            ids = await asyncio.to_thread(_encode, request.text, keep, limit, assembled.tokenizer)
        case _:
            raise InvalidRequest("The request has no prompt; set tokenized or text.")
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


def _stops(
    stop: StopStrings | None, wanted: Wanted, sampling: SamplingParams, assembled: Assembled
) -> TokenStops | None:
    if stop is None:
        return None
    return TokenStops(
        IncrementalDetokenizer(assembled.tokenizer, skip_special_tokens=wanted.skip_special_tokens),
        stop.fresh(),
        include_stop=wanted.include_stop,
        min_tokens=sampling.min_tokens,
    )


def _check_ended_by_server(output: Output, call: _Call, engine: Engine) -> None:
    """An end nobody asked for is no answer: the client may send the request to another server."""
    if output.finish_reason == "error" and not engine.is_alive:
        raise EngineClosed(_ENGINE_DIED)
    if output.finish_reason == "abort" and not call.aborted:
        raise EngineClosed("This server is shutting down and did not finish the request; send it again.")
