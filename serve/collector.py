"""From a request's outputs to one whole completion."""

from __future__ import annotations

from collections.abc import Callable

from serve.request import Completion, Output, TokenLogprob


class Collector:
    """An `on_output` that gathers the outputs of one request and hands the `Completion` to `done` at its end."""

    def __init__(self, done: Callable[[Completion], None]):
        self.done = done
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def __call__(self, output: Output) -> None:
        self.tokens += output.token_ids
        self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason:
            self.done(
                Completion(
                    output.request_id,
                    tuple(self.tokens),
                    output.finish_reason,
                    tuple(self.logprobs),
                    self.prompt_logprobs,
                    output.matched_token_id,
                    output.error,
                    output.speculation,
                )
            )
