"""Pictures and sound of a call: tensors to rows, and placeholders as a gateway writes them to those of the model."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import grpc
import ml_dtypes
import numpy as np
from smg_grpc_proto.generated import common_pb2

from serve.grpc.errors import Refusal
from serve.media.content import MediaItem
from serve.media.format import Kind, MediaFormat
from serve.media.place import place
from serve.request import InvalidRequest, Media

TEXT_ONLY = "This model reads text only; leave images, audio and video out."
_KINDS: dict[int, Kind] = {
    common_pb2.MODALITY_UNSPECIFIED: "image",
    common_pb2.IMAGE: "image",
    common_pb2.AUDIO: "audio",
}
MOST_ITEMS = 1024  # of a request; a small message may name millions
_MOST_DIMS = 8  # of a tensor; multiplying millions of sizes would hold up the server
_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "uint32": np.dtype(np.uint32),
    "uint8": np.dtype(np.uint8),
}


@dataclasses.dataclass(frozen=True)
class MediaInput:
    """One picture or clip of a call.

    A content hash that a client sends is not used: who could name the content could make others read it from the
    cache.

    Attributes:
        tensor: TensorData of either protocol that holds the rows.
        first: of them, the first of this item; count: how many are its own, None for all.
        span: offset and length of the placeholders in the prompt, as the client gives them; None if it gives none.
            The token that opens the item may be counted in.
    """

    kind: Kind
    tensor: Any
    first: int = 0
    count: int | None = None
    span: tuple[int, int] | None = None


def counted(inputs: Iterable[MediaInput]) -> tuple[MediaInput, ...]:
    """Raises InvalidRequest where there are too many, and reads no more than these."""
    items = tuple(itertools.islice(inputs, MOST_ITEMS + 1))
    if len(items) > MOST_ITEMS:
        raise InvalidRequest(f"A request may have {MOST_ITEMS} pictures and clips; send fewer.")
    return items


def kind_of(modality: int) -> Kind:
    """Raises InvalidRequest for what is neither picture nor sound."""
    if modality not in _KINDS:
        raise InvalidRequest("Video is not read; send pictures of it.")
    return _KINDS[modality]


def array(tensor: Any, name: str) -> np.ndarray:
    """A TensorData message of either protocol; no copy.

    Raises:
        InvalidRequest: unknown type, a shape that does not fit the data, or data that are not in the message.
    """
    if tensor.dtype not in _DTYPES:
        raise InvalidRequest(f"{name} has dtype {tensor.dtype!r}; send one of {', '.join(_DTYPES)}.")
    if tensor.WhichOneof("payload") != "inline":
        message = f"{name} is not in the message itself; send it inline (smg: --multimodal-tensor-transport inline)."
        raise InvalidRequest(message)
    if len(tensor.shape) > _MOST_DIMS:
        raise InvalidRequest(f"{name} has {len(tensor.shape)} dimensions; at most {_MOST_DIMS} are read.")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if not all(shape):
        raise InvalidRequest(f"{name} has no rows, or empty ones: its shape is {list(shape)}.")
    if len(tensor.inline) != math.prod(shape) * dtype.itemsize:
        raise InvalidRequest(f"{name} has {len(tensor.inline)} bytes, which is not a {tensor.dtype} array of {shape}.")
    return np.frombuffer(tensor.inline, dtype).reshape(shape)


def placed(
    prompt: Sequence[int], inputs: Sequence[MediaInput], format: MediaFormat | None
) -> tuple[tuple[int, ...], tuple[Media, ...]]:
    """The prompt with the model's own placeholders, and each item at its place. Takes a while: megabytes are read.

    Gateways name the places, and fill them with tokens of their choice: smg repeats the token that opens a picture.
    It also leaves the one placeholder standing that the chat template writes; that is taken out.

    Raises:
        InvalidRequest: rows, places and placeholders do not fit each other, or rows have impossible values.
        Refusal: UNIMPLEMENTED, if the model reads text only.
    """
    if format is None:
        if inputs:
            raise Refusal(grpc.StatusCode.UNIMPLEMENTED, TEXT_ONLY)
        return tuple(prompt), ()
    items = [MediaItem(entry.kind, _rows(entry, f"Item {i} ({entry.kind})", format)) for i, entry in enumerate(inputs)]
    if any(entry.span is not None for entry in inputs):
        prompt, items = _with_own_placeholders(prompt, inputs, items, format)
    media = place(prompt, items, format.image_token_id, format.audio_token_id)
    for item in media:  # computed here: not on the event loop, and not in the engine's thread
        item.is_finite  # noqa: B018
        item.content_hash  # noqa: B018
    return tuple(prompt), media


def _rows(entry: MediaInput, name: str, format: MediaFormat) -> np.ndarray:
    if entry.kind not in format.kinds:
        raise InvalidRequest(f"This model reads no {entry.kind}; leave it out.")
    whole = array(entry.tensor, name)
    edge = format.patch_size
    row = (format.temporal_patch_size, edge, edge, 3) if entry.kind == "image" else (format.num_mel_bins,)
    if whole.shape[1:] != row:
        wanted = ", ".join(["rows", *map(str, row)])
        raise InvalidRequest(f"{name} has shape {list(whole.shape)}; this model reads [{wanted}].")
    rows = whole[entry.first :] if entry.count is None else whole[entry.first : entry.first + entry.count]
    if not len(rows):
        raise InvalidRequest(f"{name} has no rows; each picture or clip needs at least one.")
    if entry.kind == "image":
        pixels = rows.astype(np.float32, copy=False)
        if not np.isfinite(pixels).all():
            raise InvalidRequest(f"{name} has values that are not finite numbers.")
        return pixels
    levels = np.arange(format.mel_vocab_size)
    if not np.isin(rows.astype(np.float32), levels).all():
        raise InvalidRequest(f"{name} must hold whole numbers from 0 to {levels[-1]}: the steps of its mel bands.")
    return rows.astype(np.uint8)


def _with_own_placeholders(
    prompt: Sequence[int], inputs: Sequence[MediaInput], items: Sequence[MediaItem], format: MediaFormat
) -> tuple[list[int], list[MediaItem]]:
    """The prompt with the tokens at the items' places exchanged, and the items in the order of their places."""
    if not all(entry.span is not None for entry in inputs):
        raise InvalidRequest("Some pictures or clips come with their places and some without; give all or none.")
    ids = np.array(prompt, np.int64)
    keep = np.ones(len(ids), bool)
    by_place = sorted(zip([cast(tuple[int, int], entry.span) for entry in inputs], items, strict=True), key=_offset)
    taken = 0
    for (offset, length), item in by_place:
        count, end = len(item.rows), offset + length
        start = end - count
        where = f"The {item.kind} at token {offset}"
        if start - offset not in (0, 1):
            raise InvalidRequest(f"{where} has {count} rows, but {length} placeholders; there must be one for each.")
        if offset < taken or end > len(ids):
            raise InvalidRequest(f"{where} overlaps another, or ends beyond the prompt of {len(ids)} tokens.")
        fill, own = ids[start], cast(int, format.image_token_id if item.kind == "image" else format.audio_token_id)
        if (ids[start:end] != fill).any() or (end < len(ids) and ids[end] == fill):
            raise InvalidRequest(f"{where} is not where its placeholders are: they must be the same token throughout.")
        ids[start:end] = own
        if fill != own and end < len(ids) and ids[end] == own:
            keep[end] = False
        taken = end
    return ids[keep].tolist(), [item for _, item in by_place]


def _offset(entry: tuple[tuple[int, int], MediaItem]) -> int:
    return entry[0][0]
