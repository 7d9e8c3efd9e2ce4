"""The service `tokenspeed.grpc.scheduler.TokenSpeedScheduler`: the one over which the smg gateway sends sound.

Token ids in and out. Pictures and sound come preprocessed, one item each: `encoder_input` holds its rows, patches of a
picture or dMel frames of a clip, and `placeholders` where they belong in the prompt.
Not served: KV-cache events, constrained output, prompt log-probabilities (the protocol has no place for them),
disaggregated encoding or prefill. Asking for them is an error with a sentence, never ignored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, tokenspeed_scheduler_pb2_grpc
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from serve.grpc import info
from serve.grpc.choice import Piece
from serve.grpc.errors import Refusal, with_status
from serve.grpc.media import TEXT_ONLY, MediaInput, counted, kind_of
from serve.grpc.messages import response_fields
from serve.grpc.sampling import MAX_OUTPUTS, Wanted, refuse_constraint
from serve.grpc.service import Ask
from serve.grpc.servicer import Servicer
from serve.request import InvalidRequest, SamplingParams

# Fields of SamplingParams that may be unset, by the engine's names.
_OPTIONAL = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
    "seed": "sampling_seed",
}


class TokenSpeedServicer(Servicer, tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerServicer):
    """The RPCs; see the module."""

    short_name = "tokenspeed"
    full_name = pb.DESCRIPTOR.services_by_name["TokenSpeedScheduler"].full_name
    pb = pb

    @with_status
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Continues one prompt, n times. Streamed: chunks of new tokens, then one `complete` an index."""
        self._loaded()
        assembled = self._service.accepting()
        _refuse_unsupported(request)
        if request.mm_inputs.items and assembled.media_format is None:
            raise Refusal(grpc.StatusCode.UNIMPLEMENTED, TEXT_ONLY)
        sampling, wanted = request_sampling(request, assembled.generation_config)
        prompt = request.tokenized.input_ids if request.HasField("tokenized") else None

        async def send(piece: Piece) -> None:
            fields = response_fields(piece, pb, piece.num_output_tokens)  # a chunk counts all so far in this protocol
            await context.write(pb.GenerateResponse(request_id=request.request_id, **fields))

        ask = Ask(request.request_id, prompt, sampling, wanted, request.stream, counted(_media(request)))
        await self._service.generate(ask, send)

    @with_status
    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Ends a request; its call gets `complete` with finish_reason "abort". An unknown id is no error."""
        self._loaded()
        known = self._service.abort(request.request_id)
        return pb.AbortResponse(success=known, message="Aborted." if known else "No request of this id is running.")

    @with_status
    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """Names, sizes, end tokens, what the model reads, and the sampling defaults a gateway should apply."""
        assembled = self._loaded()
        kinds = () if assembled.media_format is None else assembled.media_format.kinds
        return pb.GetModelInfoResponse(
            supports_multimodal=bool(kinds),
            supported_modalities=[common_pb2.IMAGE if kind == "image" else common_pb2.AUDIO for kind in kinds],
            **info.model_facts(assembled, self._service.served_model_name),
        )

    @with_status
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """Uptime and capacity."""
        stats, uptime = self._loaded().engine.stats(), time.monotonic() - self._service.started_at
        facts = pb.GetServerInfoResponse(active_requests=self._service.num_active, uptime_seconds=uptime)
        facts.server_args["max_num_seqs"] = stats.num_slots
        facts.start_time.FromNanoseconds(time.time_ns() - int(uptime * 1e9))
        return facts


def request_sampling(request: pb.GenerateRequest, defaults: Mapping[str, Any]) -> tuple[SamplingParams, Wanted]:
    """Reads the sampling of a request. What it leaves unset is as in `defaults` (engine's field name to value).

    Raises:
        InvalidRequest: a count below zero, more than MAX_OUTPUTS outputs, or a logit_bias of something else than a
            token id.
        Refusal: UNIMPLEMENTED for constrained output.
    """
    params = request.sampling_params
    refuse_constraint(params)
    if params.n > MAX_OUTPUTS:
        raise InvalidRequest(f"n is {params.n}; one request may have {MAX_OUTPUTS} outputs. Send several requests.")
    values = {name: value for name, value in defaults.items() if value is not None}
    values |= {name: getattr(params, field) for name, field in _OPTIONAL.items() if params.HasField(field)}
    sampling = SamplingParams(
        **values,
        logit_bias=_logit_bias(params.logit_bias),
        min_tokens=params.min_new_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=request.top_logprobs_num if request.return_logprob else None,
    )
    wanted = Wanted(
        n=params.n or 1,
        stop=tuple(params.stop),
        include_stop=params.no_stop_trim,
        skip_special_tokens=params.skip_special_tokens,
        truncate_prompt_tokens=None,
        keep_stop_token=params.no_stop_trim,
    )
    return sampling, wanted


def _logit_bias(entries: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in entries.items()}
    except ValueError as error:
        raise InvalidRequest(f"logit_bias must name token ids ({error}).") from None


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    if request.HasField("encode_bootstrap_info") or request.HasField("kv_bootstrap_info"):
        message = "This server encodes, prefills and decodes itself; leave encode_ and kv_bootstrap_info out."
        raise Refusal(grpc.StatusCode.UNIMPLEMENTED, message)
    if request.token_ids_logprob or (request.HasField("logprob_start_len") and request.logprob_start_len >= 0):
        message = "Log-probabilities are of generated tokens; leave logprob_start_len and token_ids_logprob out."
        raise Refusal(grpc.StatusCode.UNIMPLEMENTED, message)
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        raise InvalidRequest(f"data_parallel_rank is {request.data_parallel_rank}; this server has one rank, 0.")


def _media(request: pb.GenerateRequest) -> Iterator[MediaInput]:
    """The items.

    Raises:
        InvalidRequest: one is a video, has no rows, or is spread over several places.
    """
    for item in request.mm_inputs.items:
        kind = kind_of(item.modality)
        if not item.HasField("encoder_input"):
            raise InvalidRequest(f"An item ({kind}) has no encoder_input; send its rows there.")
        if len(item.placeholders) > 1:
            raise InvalidRequest(f"An item ({kind}) has {len(item.placeholders)} places; its rows stand together.")
        span = next(((place.offset, place.length) for place in item.placeholders), None)
        yield MediaInput(kind, item.encoder_input, span=span)
