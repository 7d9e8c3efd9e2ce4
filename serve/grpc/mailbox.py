"""From the engine thread to the event loop, bounded: a reader that lags gets fewer, larger pieces of news."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading

from serve.request import Output, TokenLogprob


class _News:
    """Everything about one sequence that has not been taken yet, as if it had come in one `Output`."""

    def __init__(self):
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.last = Output(request_id="")

    def add(self, output: Output) -> None:
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.last = output

    def merged(self) -> Output:
        return dataclasses.replace(
            self.last,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            prompt_logprobs=self.prompt_logprobs,
        )


class Mailbox:
    """The outputs of one RPC between the engine, which never waits, and a client, which may read slowly.

    It holds at most one `Output` a sequence. Whatever arrives before the last one was taken is merged into it, so
    what a stalled client can make the server hold is bounded by the tokens its request may generate, and the number
    of messages by how fast it reads.
    """

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._news: dict[int, _News] = {}

    def put(self, index: int, output: Output) -> None:
        """Adds news of sequence `index`. Called from the engine thread; does not block."""
        with self._lock:
            first = not self._news
            self._news.setdefault(index, _News()).add(output)
        if first:  # one wake-up serves all that arrives until the reader comes
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to read
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def get(self) -> list[tuple[int, Output]]:
        """Waits for news; the index and one merged `Output` of every sequence that has any."""
        await self._arrived.wait()
        self._arrived.clear()
        with self._lock:
            news, self._news = self._news, {}
        return [(index, item.merged()) for index, item in news.items()]
