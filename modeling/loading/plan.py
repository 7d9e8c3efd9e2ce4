"""Which bytes of which files make each leaf of a model, decided and checked from headers alone.

Touches no device and reads no tensor data: this is also how to inspect a checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from modeling.architecture import Architecture, Model, Names, architecture_of
from modeling.errors import CheckpointError
from modeling.layers.linear import NVFP4_WORD
from modeling.loading import gguf, nvfp4, safetensors
from modeling.loading.faults import Faults
from modeling.loading.quantization import check_quantization
from modeling.loading.source import Checkpoint
from modeling.loading.tensors import NUMPY_DTYPES, OnDisk, Piece, TensorInfo
from modeling.parameters import parameter_names

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf as it is on disk. `pieces` fill all of it; they are converted where the types differ.

    Attributes:
        reciprocal: the leaf is one over what is on disk.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[tuple[Piece, TensorInfo], ...]
    reciprocal: bool = False

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """The tensors that it is read from."""
        return tuple(info for _, info in self.pieces)


@dataclasses.dataclass(frozen=True)
class RowPair:
    """Two leaves of one shape [..., rows, columns] whose rows alternate in one tensor, the first leaf's first."""

    names: tuple[str, str]
    shape: tuple[int, ...]
    dtype: np.dtype
    info: TensorInfo

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """The tensor that both are read from."""
        return (self.info,)


@dataclasses.dataclass(frozen=True)
class PackedPair:
    """The `codes` and `scales` leaves of one linear layer, which are one NVFP4 tensor of a GGUF file."""

    codes: str
    scales: str
    shape: tuple[int, ...]  # [*experts, out, in]
    info: TensorInfo

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """The tensor that both are read from."""
        return (self.info,)


Target = Leaf | RowPair | PackedPair


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to fill a model.

    Attributes:
        model: abstract, its leaves `jax.ShapeDtypeStruct` of the dtypes they will have.
        options: what it was made with beside config and dtype, as the checkpoint has it.
        targets: what to read, in an order good for reading.
    """

    model: Model
    options: dict[str, Any]
    targets: tuple[Target, ...]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor that will be read, by its name on disk."""
        return {info.name: info for target in self.targets for info in target.infos}


def make_plan(checkpoint: Checkpoint, dtype: Any, router_dtype: str | None, text_only: bool = False) -> Plan:
    """Plans the loading of a safetensors or GGUF checkpoint.

    Args:
        dtype: compute dtype; in bfloat16, float32 matrices are rounded when read.
        router_dtype: "float32", "bfloat16", or None for what the file has.
        text_only: leave out towers.

    Raises:
        CheckpointError: names everything wrong that headers can tell, in one message.
    """
    architecture = architecture_of(checkpoint.config)
    faults = Faults(checkpoint.path)
    if checkpoint.kind == "gguf":
        tensors, complete = _gguf_tensors(checkpoint, architecture, faults)
    else:
        check_quantization(checkpoint, faults)
        extra = architecture.names.EXTRA_FILES
        tensors, complete = safetensors.read_headers(checkpoint.path, checkpoint.files, extra, faults)
    if not complete:  # what is there tells what the model has: with half of it, faults would be guesses
        faults.raise_any("no tensor was read")
    planner = _Planner(architecture, checkpoint, tensors, faults, dtype)
    try:
        plan = planner.plan(router_dtype, text_only)
    except CheckpointError as error:
        faults.add(str(error))
        faults.raise_any("no tensor was read")
        raise
    planner.report(text_only)
    faults.raise_any("no tensor was read")
    for notice in architecture.names.notices(checkpoint.config, plan.options, text_only):
        log.warning("%s: %s", checkpoint.path, notice)
    return plan


def _gguf_tensors(
    checkpoint: Checkpoint, architecture: Architecture, faults: Faults
) -> tuple[dict[str, TensorInfo], bool]:
    if architecture.gguf_name is None:
        raise CheckpointError(f"{checkpoint.files[0]}: this model is read from safetensors files only, not from GGUF")
    try:
        tensors, metadata, found = gguf.read_header(checkpoint.files[0])
    except CheckpointError as error:
        faults.add(str(error))
        return {}, False
    for fault in found:
        faults.add(fault)
    if _truthy(metadata.get(gguf.PREC_A4)):
        asked = f"{metadata[gguf.PREC_A4]!r:.200}"
        faults.add(f"{gguf.PREC_A4} asks for FP4 activations ({asked}); only weights may be FP4 (W4A16)")
    return tensors, True


def _truthy(value: Any) -> bool:
    return any(map(_truthy, value)) if isinstance(value, list) else bool(value)


def make_abstract(
    config: Any, dtype: jnp.dtype, options: dict[str, Any], router_dtype: str | None, text_only: bool
) -> Model:
    """The model of a checkpoint, with `jax.ShapeDtypeStruct` leaves.

    Args:
        options: what the checkpoint has. router_dtype, text_only: what the caller wants otherwise.

    Raises:
        CheckpointError: the model's parts do not fit together, or its routers are of one precision only.
    """
    architecture = architecture_of(config)
    if text_only:
        options = {name: value for name, value in options.items() if name not in architecture.names.TOWERS}
    if router_dtype is not None and "router_dtype" in options:
        options = options | {"router_dtype": router_dtype}
    elif router_dtype == "bfloat16":
        raise CheckpointError("router_dtype 'bfloat16' is Flint's only; leave it out, this model routes in float32")
    return architecture.model.abstract(config, dtype=dtype, **options)


def is_packed(struct: jax.ShapeDtypeStruct) -> bool:
    """Whether the leaf holds codes or block scales, whose bits no compute dtype changes."""
    return jnp.issubdtype(struct.dtype, jnp.unsignedinteger)


def leaf_dtype(names: Names, leaf: str, wide: bool, compute: jnp.dtype, router_dtype: str | None) -> np.dtype:
    """On-disk precision, but for float32 matrices in bfloat16 compute and for routers asked to be bfloat16.

    Args:
        leaf: its name. wide: whether it is float32 on disk, bfloat16 otherwise.
    """
    rounded = names.is_matrix(leaf) and compute == jnp.bfloat16
    rounded |= names.is_router(leaf) and router_dtype == "bfloat16"
    return NUMPY_DTYPES["F32" if wide and not rounded else "BF16"]


class _Planner:
    """Looks up the tensors of each leaf, noting what is missing, mistyped, mis-shaped or left over."""

    def __init__(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        tensors: dict[str, TensorInfo],
        faults: Faults,
        dtype: Any,
    ):
        self.architecture, self.names, self.checkpoint = architecture, architecture.names, checkpoint
        self.tensors, self.faults, self.dtype = tensors, faults, jnp.dtype(dtype)
        self.targets: list[Target] = []
        self.halves: dict[str, dict[int, str]] = defaultdict(dict)  # tensor -> row -> leaf
        self.wanted: set[str] = set()
        self.missing: set[str] = set()
        self.missing_scales: set[str] = set()  # those of them that are global scales
        self.wrong: dict[str, set[str]] = defaultdict(set)  # fault -> tensors that have it

    def plan(self, router_dtype: str | None, text_only: bool) -> Plan:
        options = self.names.options(self.checkpoint.config, self.tensors)
        model = make_abstract(self.checkpoint.config, self.dtype, options, router_dtype, text_only)
        structs, treedef = jax.tree.flatten(model)
        add = self.add_gguf if self.checkpoint.kind == "gguf" else self.add_safetensors
        filled = [
            jax.ShapeDtypeStruct(struct.shape, add(name, struct, router_dtype))
            for name, struct in zip(parameter_names(model), structs, strict=True)
        ]
        return Plan(jax.tree.unflatten(treedef, filled), options, tuple(self.targets))

    def add_safetensors(self, leaf: str, struct: jax.ShapeDtypeStruct, router_dtype: str | None) -> np.dtype:
        source = self.names.on_disk(leaf, struct.shape, self.tensors)
        target = self.plain(leaf, struct, source, router_dtype)
        if source.row is None:
            self.targets.append(target)
        elif target.infos:
            halves = self.halves[target.infos[0].name]
            halves[source.row] = leaf
            if len(halves) == 2:
                self.targets.append(RowPair((halves[0], halves[1]), target.shape, target.dtype, target.infos[0]))
        return target.dtype

    def add_gguf(self, leaf: str, struct: jax.ShapeDtypeStruct, router_dtype: str | None) -> np.dtype:
        assert self.architecture.gguf_name is not None
        tensor, part = self.architecture.gguf_name(leaf)
        if part == "codes":
            full = (*struct.shape[:-1], NVFP4_WORD * struct.shape[-1])
            info = self.find(tensor, full, ("NVFP4",))
            if full[-1] % nvfp4.BLOCK_WEIGHTS:
                self.wrong[f"input width {full[-1]} is not a multiple of {nvfp4.BLOCK_WEIGHTS}"].add(tensor)
            if info is not None:
                self.targets.append(PackedPair(leaf, leaf.removesuffix("codes") + "scales", full, info))
        if part in ("codes", "scales"):  # read together
            return struct.dtype
        alone = part == "global_scale"
        source = (
            OnDisk((Piece(tensor, struct.shape or (1,)),), ("F32",))
            if alone
            else OnDisk((Piece(tensor, struct.shape),))
        )
        target = self.plain(leaf, struct, source, router_dtype)
        self.targets.append(target)
        return target.dtype

    def plain(self, leaf: str, struct: jax.ShapeDtypeStruct, source: OnDisk, router_dtype: str | None) -> Leaf:
        found = [(piece, self.find(piece.tensor, piece.shape, source.types)) for piece in source.pieces]
        pairs = tuple((piece, info) for piece, info in found if info is not None)
        if leaf.endswith(".global_scale") and not pairs:
            self.missing_scales |= {piece.tensor for piece in source.pieces}
        wide = any(info.dtype == "F32" for _, info in pairs)
        dtype = struct.dtype if is_packed(struct) else leaf_dtype(self.names, leaf, wide, self.dtype, router_dtype)
        return Leaf(leaf, struct.shape, dtype, pairs, source.reciprocal)

    def find(self, name: str, shape: tuple[int, ...], types: tuple[str, ...]) -> TensorInfo | None:
        self.wanted.add(name)
        info = self.tensors.get(name)
        if info is None:
            self.missing.add(name)
            return None
        if info.dtype not in types:
            self.wrong[f"type {info.dtype}, expected {' or '.join(types)}"].add(name)
        if info.shape != shape:
            turned = len(shape) > 1 and info.shape == (*shape[:-2], shape[-1], shape[-2])
            note = ", the two axes are exchanged" if turned else ""
            self.wrong[f"shape {list(info.shape)}, expected {list(shape)}{note}"].add(name)
        return info

    def report(self, text_only: bool) -> None:
        """Moves what was noted to the faults."""
        unexpected = {name for name in self.tensors.keys() - self.wanted if not self.names.is_ignored(name, text_only)}
        if 2 * len(self.missing) > len(self.wanted) and 2 * len(unexpected) > len(self.tensors):
            self.faults.add(self.other_layout(unexpected))
            return
        self.faults.add_names("missing tensor", self.missing - self.missing_scales)
        self.faults.add_names("missing global scale of an NVFP4 tensor", self.missing_scales)
        reasons: dict[str | None, list[str]] = defaultdict(list)
        for name in unexpected:
            reasons[self.names.refusal(name, self.checkpoint.config)].append(name)
        self.faults.add_names("unexpected tensor", reasons.pop(None, []))
        for reason, names in reasons.items():
            self.faults.add(f"unexpected tensor: {_sample(names)}: {reason}")
        for fault, tensors in self.wrong.items():
            self.faults.add_names(fault, tensors)

    def other_layout(self, unexpected: set[str]) -> str:
        """What to say when most of what is there is not what is looked for."""
        hints = [hint for part, hint in self.names.OTHER_LAYOUTS.items() if any(part in name for name in unexpected)]
        hint = "; ".join(hints) or "use the checkpoint as it was released"
        return (
            f"the tensors are named as in another layout: found {_sample(unexpected)}; looked for "
            f"{_sample(self.missing)}; {hint}"
        )


def _sample(names: Collection[str]) -> str:
    few = sorted(names)[:3]
    return ", ".join(few) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
