"""Pieces of answers as protocol messages. Both protocols name these fields alike; `pb` is the module of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from serve.grpc.choice import Piece
from serve.request import TokenLogprob


def response_fields(piece: Piece, pb: Any, chunk_tokens: int, **more: Any) -> dict[str, Any]:
    """The field `chunk` or `complete` of a GenerateResponse.

    Args:
        piece: what to send.
        chunk_tokens: `completion_tokens` of a chunk.
        more: further fields of either message.
    """
    fields = more | {
        "prompt_tokens": piece.output.num_prompt_tokens,
        "cached_tokens": piece.output.num_cached_tokens,
        "output_logprobs": output_logprobs(piece.logprobs, pb),
        "index": piece.index,
    }
    if piece.finish_reason is None:
        return {"chunk": pb.GenerateStreamChunk(token_ids=piece.token_ids, completion_tokens=chunk_tokens, **fields)}
    if piece.stop is not None:
        fields["matched_stop_str"] = piece.stop
    elif piece.matched_token_id is not None:
        fields["matched_token_id"] = piece.matched_token_id
    complete = pb.GenerateComplete(
        output_ids=piece.token_ids,
        finish_reason=piece.finish_reason,
        completion_tokens=piece.num_output_tokens,
        spec_draft_tokens=piece.output.speculation.num_draft_tokens,
        spec_accepted_tokens=piece.output.speculation.num_accepted_tokens,
        **fields,
    )
    return {"complete": complete}


def output_logprobs(entries: Sequence[TokenLogprob], pb: Any) -> Any:
    """One position a generated token; None for none. The engine has floored the values: all are finite."""
    if not entries:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=top_logprobs(entries, pb),
    )


def top_logprobs(entries: Iterable[TokenLogprob | None], pb: Any) -> list[Any]:
    """The alternatives, a position an entry; none at all where none were asked for."""
    tops = [() if entry is None else entry.top for entry in entries]
    if not any(tops):
        return []
    return [pb.TopLogProbs(token_ids=[token for token, _ in top], values=[value for _, value in top]) for top in tops]
