"""One output sequence of a Generate call: engine outputs in, protocol messages out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serve.grpc.errors import Refusal
from serve.grpc.stops import TokenStops
from serve.request import Output, TokenLogprob


class Choice:
    """Collects sequence `index`. Streamed, every token goes out in exactly one chunk, log-probabilities beside it,
    and `complete` repeats the tokens only; else `complete` carries everything.

    Args:
        index: which of the n outputs.
        stream: send chunks.
        prompt_token_ids: for the prompt's log-probabilities.
        stops: finds the request's stop strings; None without any.
    """

    def __init__(self, index: int, *, stream: bool, prompt_token_ids: Sequence[int], stops: TokenStops | None):
        self._index, self._stream, self._prompt, self._stops = index, stream, prompt_token_ids, stops
        self._token_ids: list[int] = []  # all so far, those a stop string may still claim included
        self._sent = 0  # of them, how many went out in chunks
        self._held_logprobs: list[TokenLogprob] = []  # of the tokens that did not go out yet
        self._logprobs = pb.OutputLogProbs()  # not streamed: of all tokens
        self._prompt_logprobs: pb.InputLogProbs | None = None
        self.finished = False
        self.stopped_by: str | None = None

    def advance(self, output: Output) -> list[pb.GenerateResponse]:
        """Takes news of the sequence; returns the messages to send, `complete` last.

        After it `finished` says whether that was all, and `stopped_by` the stop string, in which case the engine
        does not know yet that it is over.

        Raises:
            Refusal: INTERNAL, when the engine reports an error.
        """
        if output.finish_reason == "error":
            raise Refusal(grpc.StatusCode.INTERNAL, output.error or "The engine failed on this request.")
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = input_logprobs(self._prompt, output.prompt_logprobs)
        self._token_ids += output.token_ids
        self._held_logprobs += output.logprobs
        ready = self._search(output)
        self.finished = self.stopped_by is not None or output.finish_reason is not None
        logprobs = output_logprobs(self._held_logprobs[: ready - self._sent])
        del self._held_logprobs[: ready - self._sent]
        messages = []
        if self._stream:
            if ready > self._sent or self._prompt_logprobs is not None:
                messages.append(self._chunk(output, ready, logprobs))
        elif logprobs is not None:
            self._logprobs.MergeFrom(logprobs)
        self._sent = ready
        if self.finished:
            messages.append(self._complete(output))
        return messages

    def _search(self, output: Output) -> int:
        """How many tokens may go out, after looking for stop strings in the new ones."""
        everything = len(self._token_ids)
        if self._stops is None:
            return everything
        # The end token is no text: a stop string cannot end in it.
        end = len(output.token_ids) - (output.matched_token_id is not None)
        ready, self.stopped_by = self._stops.push(output.token_ids[:end])
        if self.stopped_by is not None:
            del self._token_ids[ready:]
            return ready
        return everything if output.finish_reason else ready

    def _chunk(self, output: Output, ready: int, logprobs: pb.OutputLogProbs | None) -> pb.GenerateResponse:
        chunk = pb.GenerateStreamChunk(
            token_ids=self._token_ids[self._sent : ready],
            prompt_tokens=output.num_prompt_tokens,
            completion_tokens=ready - self._sent,  # of this chunk, as vLLM counts here
            cached_tokens=output.num_cached_tokens,
            output_logprobs=logprobs,
            input_logprobs=self._prompt_logprobs,
            index=self._index,
        )
        self._prompt_logprobs = None
        return pb.GenerateResponse(chunk=chunk)

    def _complete(self, output: Output) -> pb.GenerateResponse:
        complete = pb.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason="stop" if self.stopped_by is not None else output.finish_reason,
            prompt_tokens=output.num_prompt_tokens,
            completion_tokens=len(self._token_ids),
            cached_tokens=output.num_cached_tokens,
            output_logprobs=self._logprobs if self._logprobs.token_ids else None,
            input_logprobs=self._prompt_logprobs,
            index=self._index,
        )
        if self.stopped_by is not None:
            complete.matched_stop_str = self.stopped_by
        elif output.matched_token_id is not None:
            complete.matched_token_id = output.matched_token_id
        return pb.GenerateResponse(complete=complete)


def output_logprobs(entries: Sequence[TokenLogprob]) -> pb.OutputLogProbs | None:
    """One position a generated token; None for none. The engine has floored the values: all are finite."""
    if not entries:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=_top(entries),
    )


def input_logprobs(prompt: Sequence[int], entries: Sequence[TokenLogprob | None]) -> pb.InputLogProbs:
    """One position a prompt token; the first has no value."""
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=None if entry is None else entry.logprob) for entry in entries],
        token_ids=prompt[: len(entries)],
        top_logprobs=_top(entries),
    )


def _top(entries: Iterable[TokenLogprob | None]) -> list[pb.TopLogProbs]:
    """The alternatives, a position an entry; none at all where none were asked for."""
    tops = [() if entry is None else entry.top for entry in entries]
    if not any(tops):
        return []
    return [pb.TopLogProbs(token_ids=[token for token, _ in top], values=[value for _, value in top]) for top in tops]
