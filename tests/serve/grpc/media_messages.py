"""Calls with pictures and sound, in both protocols."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as ts
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

MODALITIES = {"image": common_pb2.IMAGE, "audio": common_pb2.AUDIO, "video": common_pb2.VIDEO}
_ids = (f"media-{i}" for i in itertools.count())


def patches(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 2, 40, 40, 3)).astype(np.float32)


def frames(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 16, (count, 80)).astype(np.uint8)


def fill(message, values: np.ndarray) -> None:
    """A TensorData of either protocol."""
    message.shape.extend(values.shape)
    message.dtype = values.dtype.name
    message.inline = values.tobytes()


def tokenspeed(prompt, items=(), *, request_id=None, stream=False, **sampling) -> ts.GenerateRequest:
    """`items`: (kind, rows, (offset, length) or None). Sound goes as bfloat16, as smg sends it."""
    request = ts.GenerateRequest(request_id=request_id or next(_ids), stream=stream)
    for name in ("return_logprob", "top_logprobs_num", "logprob_start_len", "token_ids_logprob"):
        if name in sampling:
            value = sampling.pop(name)
            getattr(request, name).extend(value) if name == "token_ids_logprob" else setattr(request, name, value)
    request.tokenized.input_ids.extend(prompt)
    request.sampling_params.CopyFrom(ts.SamplingParams(**sampling))
    for kind, rows, span in items:
        item = request.mm_inputs.items.add(modality=MODALITIES[kind])
        fill(item.encoder_input, rows.astype(ml_dtypes.bfloat16) if rows.dtype == np.uint8 else rows)
        if span is not None:
            item.placeholders.add(offset=span[0], length=span[1])
    return request


def vllm(prompt, batches=(), **sampling) -> pb.GenerateRequest:
    """`batches`: (kind, rows of each item, spans or None); sizes as smg gives them."""
    request = pb.GenerateRequest(request_id=next(_ids))
    request.tokenized.input_ids.extend(prompt)
    request.sampling_params.CopyFrom(pb.SamplingParams(**sampling))
    for i, (kind, items, spans) in enumerate(batches):
        batch = request.extra_mm_inputs.add() if i else request.mm_inputs
        batch.modality = MODALITIES[kind]
        fill(batch.pixel_values, np.concatenate(items))
        fill(batch.model_specific_tensors["tokens_per_item"], np.int64([len(rows) for rows in items]))
        batch.flat_keys["pixel_values"] = "tokens_per_item"
        for offset, length in spans or ():
            batch.mm_placeholders.add(offset=offset, length=length)
    return request
