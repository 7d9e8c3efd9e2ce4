"""One output sequence of a Generate call: engine outputs in, pieces of the answer out, whatever the protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import grpc

from serve.grpc.errors import Refusal
from serve.grpc.stops import TokenStops
from serve.request import Output, TokenLogprob


@dataclasses.dataclass(frozen=True)
class Piece:
    """What goes to the client about output `index`, in one message.

    Attributes:
        token_ids: new tokens; with `finish_reason` all of the sequence.
        logprobs: of these tokens, where they go out here, else empty.
        prompt_logprobs: as in `Output`, on one piece of the sequence; prompt_token_ids: what they belong to.
        finish_reason: None for a chunk; "stop", "length" or "abort" completes the sequence.
        stop: the stop string found; matched_token_id: the end or stop token, which is the last of the tokens unless
            it was to be left out.
        num_output_tokens: so far, a left out end token included.
        output: the engine's news behind it, for the other counts.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    prompt_token_ids: Sequence[int]
    num_output_tokens: int
    output: Output
    finish_reason: str | None = None
    stop: str | None = None
    matched_token_id: int | None = None


class Choice:
    """Collects sequence `index`. Streamed, every token goes out in exactly one chunk, log-probabilities beside it,
    and the completing piece repeats the tokens only; else that piece carries everything.

    Args:
        index: which of the n outputs.
        stream: send chunks.
        prompt_token_ids: for the prompt's log-probabilities.
        stops: finds the request's stop strings; None without any.
        keep_stop_token: the end or stop token that was matched is part of the output.
    """

    def __init__(
        self,
        index: int,
        *,
        stream: bool,
        prompt_token_ids: Sequence[int],
        stops: TokenStops | None,
        keep_stop_token: bool = True,
    ):
        self._index, self._stream, self._prompt = index, stream, prompt_token_ids
        self._stops, self._keep_stop_token = stops, keep_stop_token
        self._token_ids: list[int] = []  # all so far, those a stop string may still claim included
        self._sent = 0  # of them, how many went out in chunks
        self._logprobs: list[TokenLogprob] = []  # of the tokens that did not go out yet
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._left_out = 0
        self.finished = False
        self.stopped_by: str | None = None

    def advance(self, output: Output) -> list[Piece]:
        """Takes news of the sequence; returns the pieces to send, the completing one last.

        After it `finished` says whether that was all, and `stopped_by` the stop string, in which case the engine
        does not know yet that it is over.

        Raises:
            Refusal: INTERNAL, when the engine reports an error.
        """
        if output.finish_reason == "error":
            raise Refusal(grpc.StatusCode.INTERNAL, output.error or "The engine failed on this request.")
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs
        ready = self._search(output)
        self.finished = self.stopped_by is not None or output.finish_reason is not None
        pieces = []
        if self._stream:
            if ready > self._sent or self._prompt_logprobs is not None:
                pieces.append(self._chunk(output, ready))
            self._sent = ready
        if self.finished:
            pieces.append(self._complete(output))
        return pieces

    def _search(self, output: Output) -> int:
        """How many tokens may go out, after looking for stop strings in the new ones."""
        # The end token is no text: a stop string cannot end in it.
        end = len(output.token_ids) - (output.matched_token_id is not None)
        if self._stops is None:
            ready = len(self._token_ids)
        else:
            ready, self.stopped_by = self._stops.push(output.token_ids[:end])
            if self.stopped_by is not None:
                del self._token_ids[ready:]
                return ready
            ready = len(self._token_ids) if output.finish_reason else ready
        if output.matched_token_id is not None and not self._keep_stop_token:
            del self._token_ids[-1:]
            self._left_out = 1
            ready -= 1
        return ready

    def _chunk(self, output: Output, ready: int) -> Piece:
        token_ids = tuple(self._token_ids[self._sent : ready])
        piece = Piece(self._index, token_ids, *self._take(len(token_ids)), self._prompt, ready + self._left_out, output)
        self._prompt_logprobs = None
        return piece

    def _complete(self, output: Output) -> Piece:
        return Piece(
            self._index,
            tuple(self._token_ids),
            *self._take(len(self._token_ids) - self._sent),
            self._prompt,
            len(self._token_ids) + self._left_out,
            output,
            finish_reason="stop" if self.stopped_by is not None else output.finish_reason,
            stop=self.stopped_by,
            matched_token_id=None if self.stopped_by is not None else output.matched_token_id,
        )

    def _take(self, count: int) -> tuple[tuple[TokenLogprob, ...], tuple[TokenLogprob | None, ...] | None]:
        """The log-probabilities of the next `count` tokens, and the prompt's if they have not gone out."""
        taken = tuple(self._logprobs[:count])
        del self._logprobs[:count]
        return taken, self._prompt_logprobs
