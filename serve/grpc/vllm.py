"""The service `vllm.grpc.engine.VllmEngine`: what the smg gateway and other clients of vLLM's gRPC face call.

Token ids in and out; text prompts are taken too, as raw completion prompts in which special tokens are recognised.
Pictures and sound come preprocessed: `pixel_values` holds the rows of all items of a batch, pictures' patches or, with
the modality AUDIO, dMel frames; `tokens_per_item` says how many each has.
Not served: embeddings, KV-cache events, constrained output, media by reference, disaggregated prefill. Asking for them
is an error with a sentence, never ignored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

import grpc
import numpy as np
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from serve.grpc import info
from serve.grpc.choice import Piece
from serve.grpc.errors import Refusal, refused, with_status
from serve.grpc.media import MOST_ITEMS, TEXT_ONLY, MediaInput, array, counted, kind_of
from serve.grpc.messages import response_fields, top_logprobs
from serve.grpc.sampling import request_sampling
from serve.grpc.service import Ask
from serve.grpc.servicer import Servicer
from serve.request import InvalidRequest, TokenLogprob

_SIZES = "tokens_per_item"


class VllmEngineServicer(Servicer, vllm_engine_pb2_grpc.VllmEngineServicer):
    """The RPCs; see the module."""

    short_name = "vllm"
    full_name = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
    pb = pb

    @with_status
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Continues one prompt, n times. Streamed: chunks of new tokens, then one `complete` an index."""
        self._loaded()
        assembled = self._service.accepting()
        _refuse_unsupported(request)
        media = counted(_media(request))
        if media and assembled.media_format is None:
            raise Refusal(grpc.StatusCode.UNIMPLEMENTED, TEXT_ONLY)
        sampling, wanted = request_sampling(request, assembled.generation_config)

        async def send(piece: Piece) -> None:
            if piece.prompt_logprobs is None:
                message = _message(piece)
            else:  # a long prompt's take a second to convert; other streams go on
                message = await asyncio.to_thread(_message, piece)
            await context.write(message)

        ask = Ask(request.request_id, _prompt(request), sampling, wanted, request.stream, media)
        await self._service.generate(ask, send)

    @with_status
    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Ends requests; their calls get `complete` with finish_reason "abort". Unknown ids are no error."""
        self._loaded()
        for request_id in request.request_ids:
            self._service.abort(request_id)
        return pb.AbortResponse()

    @with_status
    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """Names, sizes, end tokens, and the sampling defaults a gateway should apply."""
        facts = info.model_facts(self._loaded(), self._service.served_model_name)
        return pb.GetModelInfoResponse(is_generation=True, **facts)

    @with_status
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """Uptime and capacity."""
        stats = self._loaded().engine.stats()
        return pb.GetServerInfoResponse(
            active_requests=self._service.num_active,
            last_receive_timestamp=self._service.last_receive,
            uptime_seconds=time.monotonic() - self._service.started_at,
            server_type="vllm-grpc",
            data_parallel_size=1,
            max_num_seqs=stats.num_slots,
        )

    Embed = refused(grpc.StatusCode.UNIMPLEMENTED, "This server generates text; it has no embeddings.")


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    if request.HasField("media_refs"):
        message = "This server fetches no media; send them preprocessed, in mm_inputs."
        raise Refusal(grpc.StatusCode.UNIMPLEMENTED, message)
    if request.HasField("kv_transfer_params") or request.HasField("kv_transfer_params_json"):
        message = "This server does prefill and decode itself; leave kv_transfer_params out."
        raise Refusal(grpc.StatusCode.UNIMPLEMENTED, message)
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        raise InvalidRequest(f"data_parallel_rank is {request.data_parallel_rank}; this server has one rank, 0.")


def _prompt(request: pb.GenerateRequest) -> Sequence[int] | str | None:
    match request.WhichOneof("input"):
        case "tokenized":
            return request.tokenized.input_ids
        case "text":
            return request.text
        case _:
            return None


def _media(request: pb.GenerateRequest) -> Iterator[MediaInput]:
    """The items of all batches.

    Raises:
        InvalidRequest: a batch's tensors, sizes, places or hashes differ in number.
    """
    batches = [request.mm_inputs] if request.HasField("mm_inputs") else []
    for batch in [*batches, *request.extra_mm_inputs]:
        kind = kind_of(batch.modality)
        if not batch.HasField("pixel_values") or not batch.pixel_values.shape:
            raise InvalidRequest(f"The {kind} inputs have no pixel_values; send their rows there.")
        rows, places = batch.pixel_values.shape[0], batch.mm_placeholders
        sizes = _sizes(batch, rows)
        if sum(sizes) != rows:
            raise InvalidRequest(f"{_SIZES} adds up to {sum(sizes)}, but there are {rows} rows.")
        for name, entries in (("mm_placeholders", places), ("mm_hashes", batch.mm_hashes)):
            if entries and len(entries) != len(sizes):
                raise InvalidRequest(f"There are {len(sizes)} items ({kind}), but {len(entries)} {name}.")
        first = 0
        for i, size in enumerate(sizes):
            span = (places[i].offset, places[i].length) if places else None
            yield MediaInput(kind, batch.pixel_values, first, size, span)
            first += size


def _sizes(batch: pb.MultimodalInputs, rows: int) -> list[int]:
    """How many rows each item of a batch has: as it says, as its places tell, or all rows are one item's."""
    name = next(iter(batch.flat_keys.values()), _SIZES)
    if name in batch.model_specific_tensors:
        sizes = array(batch.model_specific_tensors[name], name).ravel().astype(np.int64)
        if len(sizes) > MOST_ITEMS or (sizes < 1).any():
            raise InvalidRequest(f"{name} must give each of at most {MOST_ITEMS} items one row or more.")
        return sizes.tolist()
    if len(batch.mm_placeholders) > MOST_ITEMS:
        raise InvalidRequest(f"There are {len(batch.mm_placeholders)} mm_placeholders; at most {MOST_ITEMS} are read.")
    lengths = [place.length for place in batch.mm_placeholders]
    if lengths and sum(lengths) == rows + len(lengths):  # each counts the token that opens the item
        return [length - 1 for length in lengths]
    return lengths if sum(lengths) == rows else [rows]


def _message(piece: Piece) -> pb.GenerateResponse:
    prompt = None
    if piece.prompt_logprobs is not None:
        prompt = input_logprobs(piece.prompt_token_ids, piece.prompt_logprobs)
    return pb.GenerateResponse(**response_fields(piece, pb, len(piece.token_ids), input_logprobs=prompt))


def input_logprobs(prompt: Sequence[int], entries: Sequence[TokenLogprob | None]) -> pb.InputLogProbs:
    """One position a prompt token; the first has no value."""
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=None if entry is None else entry.logprob) for entry in entries],
        token_ids=prompt[: len(entries)],
        top_logprobs=top_logprobs(entries, pb),
    )
