"""The protocol's SamplingParams to the engine's, field by field.

proto3 cannot tell zero from unset in fields without `optional`. Unset means vLLM's neutral value: temperature 1,
top_p 1, no top_k, no min_p, repetition_penalty 1, one output. A gateway applies the model's own defaults, which it
reads from GetModelInfo; a request without any SamplingParams gets them here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serve.grpc.errors import Refusal
from serve.request import InvalidRequest, SamplingParams

MAX_OUTPUTS = 128  # of one request

_NEGATIVE = 2**31  # a uint32 from here on is a negative number that lost its sign on the way
_NO_LIMIT = 2**32 - 1  # a top_k of -1, without its sign


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a request asks of the server rather than of the engine.

    Attributes:
        n: outputs for the one prompt.
        stop: stop strings.
        include_stop: keep the stop string in the output.
        skip_special_tokens: stop strings are searched in text without special tokens.
        truncate_prompt_tokens: keep this many last tokens of the prompt; -1 for as many as fit; None for all.
        keep_stop_token: the end or stop token that ends an output is the last of its tokens.
    """

    n: int
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    truncate_prompt_tokens: int | None
    keep_stop_token: bool = True


def request_sampling(request: pb.GenerateRequest, defaults: Mapping[str, Any]) -> tuple[SamplingParams, Wanted]:
    """The request's sampling, or `defaults` (engine's field name to value) where it has none; raises as below."""
    sampling, wanted = sampling_from_proto(request.sampling_params)
    if not request.HasField("sampling_params"):
        sampling = dataclasses.replace(sampling, **{name: v for name, v in defaults.items() if v is not None})
    return sampling, wanted


def sampling_from_proto(params: pb.SamplingParams) -> tuple[SamplingParams, Wanted]:
    """Reads one message.

    `spaces_between_special_tokens` changes nothing, since no text is returned, and `grammar_from_first_token`
    nothing without a constraint.

    Raises:
        InvalidRequest: a count below zero, or more than MAX_OUTPUTS outputs.
        Refusal: UNIMPLEMENTED for constrained output.
    """
    refuse_constraint(params)
    top_k = 0 if params.top_k == _NO_LIMIT else params.top_k
    for name in ("max_tokens", "min_tokens", "n"):
        if getattr(params, name) >= _NEGATIVE:
            raise InvalidRequest(f"{name} is {getattr(params, name) - 2**32}; it cannot be negative.")
    if params.n > MAX_OUTPUTS:
        raise InvalidRequest(f"n is {params.n}; one request may have {MAX_OUTPUTS} outputs. Send several requests.")
    truncate = _optional(params, "truncate_prompt_tokens")
    if truncate is not None and (truncate == 0 or truncate < -1):
        raise InvalidRequest(f"truncate_prompt_tokens is {truncate}; give a positive number, or -1 for the most.")
    sampling = SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=top_k - 2**32 if top_k >= _NEGATIVE else top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        seed=_optional(params, "seed"),
        max_tokens=_optional(params, "max_tokens"),
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=_optional(params, "logprobs"),
        prompt_logprobs=_optional(params, "prompt_logprobs"),
    )
    wanted = Wanted(
        n=params.n or 1,
        stop=tuple(params.stop),
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        truncate_prompt_tokens=truncate,
    )
    return sampling, wanted


def seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """The parameters of output `index` of n: as vLLM, its seed is the request's plus the index."""
    return sampling if sampling.seed is None else dataclasses.replace(sampling, seed=sampling.seed + index)


def _optional(params: pb.SamplingParams, name: str) -> int | None:
    return getattr(params, name) if params.HasField(name) else None


def refuse_constraint(params: Any) -> None:
    """Raises Refusal, UNIMPLEMENTED, if the SamplingParams of either protocol constrain the output."""
    constraint = params.WhichOneof("constraint")
    if constraint is None:
        return
    message = f"This server does not constrain output yet ({constraint}). Leave the constraint out"
    message += "; in a chat request: response_format 'text', tool_choice 'auto', no strict tool."
    raise Refusal(grpc.StatusCode.UNIMPLEMENTED, message)
