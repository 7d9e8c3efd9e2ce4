"""What the gRPC layer asks of the rest: an engine, a tokenizer, and the assembly of both.

They are protocols so that nothing here imports JAX; `serve.engine.Engine` and `serve.stub.StubEngine` both fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from serve.request import Output, Request


class EngineStats(Protocol):
    """Counts of one moment; totals are since the start."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def kv_pages_used(self) -> int: ...
    @property
    def kv_pages_total(self) -> int: ...


class Engine(Protocol):
    """Token ids in, token ids out. Every method is thread-safe; all but `start` and `drain` return at once."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    def start(self) -> None: ...
    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def stats(self) -> EngineStats: ...
    def drain(self, timeout_s: float) -> None: ...
    def close(self) -> None: ...


class Tokenizer(Protocol):
    """Text to token ids; `prefix_ids` belong in front of a prompt that is not a chat."""

    @property
    def prefix_ids(self) -> Sequence[int]: ...
    def encode(self, text: str, *, parse_special: bool = True) -> Sequence[int]: ...


class Assembled(Protocol):
    """A model ready to serve, as `serve.assemble.assemble` returns it."""

    @property
    def engine(self) -> Engine: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...  # default sampling values, named as in SamplingParams
    @property
    def model_name(self) -> str: ...
    @property
    def model_dir(self) -> str | Path: ...
