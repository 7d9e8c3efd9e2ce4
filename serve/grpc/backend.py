"""What the gRPC layer asks of the rest: an engine, a tokenizer, and the assembly of both.

They are protocols so that nothing here imports JAX; `serve.engine.Engine` fits, and so does the tests' stub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from serve.media.format import MediaFormat
from serve.request import EngineStats, Output, Request


class Engine(Protocol):
    """Token ids in, token ids out. Every method is thread-safe; all but `start` and `drain` return at once."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def is_alive(self) -> bool: ...  # False once its thread has died of a fault; it answers nothing any more then
    def start(self) -> None: ...
    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None: ...
    def abort(self, request_id: str, reason: Literal["abort", "stop"] = "abort") -> bool: ...
    def stats(self) -> EngineStats: ...
    def drain(self, timeout_s: float) -> None: ...
    def close(self) -> None: ...


class Tokenizer(Protocol):
    """Text to token ids; `prefix_ids` belong in front of a prompt that is not a chat, `source` is its file."""

    @property
    def source(self) -> Path | None: ...
    @property
    def prefix_ids(self) -> Sequence[int]: ...
    @property
    def max_token_bytes(self) -> int: ...  # of the longest token
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
    def model_dir(self) -> Path: ...
    @property
    def tokenizer_dir(self) -> Path: ...  # the folder of the tokenizer's files
    @property
    def media_format(self) -> MediaFormat | None: ...  # what the model reads beside text; None for text only
