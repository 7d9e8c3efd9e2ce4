"""Every architecture that can be run: the one place that knows them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from modeling.flint import names as flint_names
from modeling.flint.config import FlintConfig
from modeling.flint.model import Flint
from modeling.inkling import names as inkling_names
from modeling.inkling.config import InklingConfig
from modeling.inkling.model import Inkling
from modeling.loading.tensors import OnDisk, TensorInfo
from sharding.rules import Dimension

Config = FlintConfig | InklingConfig
Model = Flint | Inkling


class Names(Protocol):
    """What a `names` module says of one architecture's parameters and checkpoints. Leaves are named by their paths in
    the module tree.

    Attributes:
        TOWERS: parts of the model for other input than text: options that make them, and first names of their leaves.
        EXTRA_FILES: weight files that an index may leave out.
        OTHER_LAYOUTS: a part of tensor names in layouts that are not read -> what to say of that layout.
    """

    @property
    def TOWERS(self) -> tuple[str, ...]: ...
    @property
    def EXTRA_FILES(self) -> tuple[str, ...]: ...
    @property
    def OTHER_LAYOUTS(self) -> Mapping[str, str]: ...

    @staticmethod
    def is_router(leaf: str) -> bool: ...
    @staticmethod
    def is_matrix(leaf: str) -> bool: ...
    @staticmethod
    def options(config: Any, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]: ...
    @staticmethod
    def notices(config: Any, options: Mapping[str, Any], text_only: bool) -> list[str]: ...
    @staticmethod
    def on_disk(leaf: str, shape: tuple[int, ...], tensors: Mapping[str, TensorInfo]) -> OnDisk: ...
    @staticmethod
    def is_ignored(tensor: str, text_only: bool) -> bool: ...
    @staticmethod
    def refusal(tensor: str, config: Any) -> str | None: ...
    @staticmethod
    def logical_axes(leaf: str, ndim: int) -> tuple[str | None, ...]: ...
    @staticmethod
    def dimensions(config: Any) -> list[Dimension]: ...


class Architecture(NamedTuple):
    """One architecture: its config, its model, and the names of its parameters.

    Attributes:
        gguf_name: a leaf's tensor in a GGUF file, and its part; None where there are no GGUF files of it.
    """

    config: type[Config]
    model: type[Model]
    names: Names
    gguf_name: Callable[[str], tuple[str, str]] | None = None


ARCHITECTURES: dict[str, Architecture] = {  # by `model_type`
    "flint": Architecture(FlintConfig, Flint, flint_names, flint_names.gguf_name),
    "inkling_mm_model": Architecture(InklingConfig, Inkling, inkling_names),
}


def architecture_of(config: Config) -> Architecture:
    """The architecture that a config belongs to."""
    return next(known for known in ARCHITECTURES.values() if isinstance(config, known.config))
