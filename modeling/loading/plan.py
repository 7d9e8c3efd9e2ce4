"""Which bytes of which files make each leaf of a model, decided and checked from headers alone.

Touches no device and reads no tensor data: this is also how to inspect a checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from modeling.errors import CheckpointError
from modeling.flint import names as flint_names
from modeling.flint.model import Flint
from modeling.loading import gguf, nvfp4, safetensors
from modeling.loading.faults import Faults
from modeling.loading.source import Checkpoint
from modeling.loading.tensors import NUMPY_DTYPES, Piece, TensorInfo
from modeling.parameters import parameter_names

log = logging.getLogger(__name__)

_PLAIN = ("BF16", "F32")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of plain numbers. `pieces` fill all of it; they are converted where the types differ."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[tuple[Piece, TensorInfo], ...]


@dataclasses.dataclass(frozen=True)
class PackedPair:
    """The `codes` and `scales` leaves of one linear layer, which are one NVFP4 tensor on disk."""

    codes: str
    scales: str
    shape: tuple[int, ...]  # [*experts, out, in]
    info: TensorInfo


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to fill a model.

    Attributes:
        model: abstract, its leaves `jax.ShapeDtypeStruct` of the dtypes they will have.
        targets: what to read, in an order good for reading.
    """

    model: Flint
    targets: tuple[Leaf | PackedPair, ...]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor that will be read, by its name on disk."""
        infos = [t.info for t in self.targets if isinstance(t, PackedPair)]
        infos += [info for t in self.targets if isinstance(t, Leaf) for _, info in t.pieces]
        return {info.name: info for info in infos}


def make_plan(checkpoint: Checkpoint, dtype: Any, router_dtype: str | None) -> Plan:
    """Plans the loading of a safetensors or GGUF checkpoint.

    Args:
        dtype: compute dtype; in bfloat16, float32 matrices are rounded when read.
        router_dtype: "float32", "bfloat16", or None for what the file has.

    Raises:
        CheckpointError: names everything wrong that headers can tell, in one message.
    """
    faults = Faults(checkpoint.path)
    if checkpoint.kind == "gguf":
        tensors, complete = _gguf_tensors(checkpoint, faults)
    else:
        tensors, complete = safetensors.read_headers(checkpoint.path, checkpoint.files, faults)
    planner = _Planner(tensors, faults, dtype, router_dtype)
    plan = planner.plan(checkpoint)
    planner.report(complete)
    faults.raise_any("no tensor was read")
    return plan


def _gguf_tensors(checkpoint: Checkpoint, faults: Faults) -> tuple[dict[str, TensorInfo], bool]:
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


def leaf_dtype(leaf: str, wide: bool, compute: jnp.dtype, router_dtype: str | None) -> np.dtype:
    """On-disk precision, but for float32 matrices in bfloat16 compute and for routers asked to be bfloat16.

    Args:
        leaf: its name. wide: whether it is float32 on disk, bfloat16 otherwise.
    """
    rounded = flint_names.is_matrix(leaf) and compute == jnp.bfloat16
    rounded |= flint_names.is_router(leaf) and router_dtype == "bfloat16"
    return NUMPY_DTYPES["F32" if wide and not rounded else "BF16"]


class _Planner:
    """Looks up the tensors of each leaf, noting what is missing, mistyped, mis-shaped or left over."""

    def __init__(self, tensors: dict[str, TensorInfo], faults: Faults, dtype: Any, router_dtype: str | None):
        self.tensors, self.faults = tensors, faults
        self.dtype, self.router_dtype = jnp.dtype(dtype), router_dtype
        self.wanted: set[str] = set()
        self.missing: set[str] = set()
        self.wrong: dict[str, set[str]] = defaultdict(set)  # fault -> tensors that have it

    def plan(self, checkpoint: Checkpoint) -> Plan:
        packed = checkpoint.kind == "gguf"
        abstract = Flint.abstract(
            checkpoint.config,
            dtype=self.dtype,
            weight_format="nvfp4" if packed else "bf16",
            router_dtype=self.router_dtype or self.router_dtype_on_disk(packed),
        )
        structs, treedef = jax.tree.flatten(abstract)
        plan_leaf = self.gguf_target if packed else self.safetensors_target
        targets, filled = [], []
        for name, struct in zip(parameter_names(abstract), structs, strict=True):
            target = plan_leaf(name, struct.shape)
            leaf_dtype = target.dtype if isinstance(target, Leaf) else struct.dtype
            filled.append(jax.ShapeDtypeStruct(struct.shape, leaf_dtype))
            if target is not None:
                targets.append(target)
        return Plan(jax.tree.unflatten(treedef, filled), tuple(targets))

    def router_dtype_on_disk(self, packed: bool) -> str:
        suffix = ".ffn_gate_inp.weight" if packed else ".mlp.gate.weight"
        types = {info.dtype for name, info in self.tensors.items() if name.endswith(suffix)}
        return "bfloat16" if types == {"BF16"} else "float32"

    def safetensors_target(self, leaf: str, shape: tuple[int, ...]) -> Leaf:
        return self.plain(leaf, shape, flint_names.safetensors_pieces(leaf, shape, self.tensors))

    def gguf_target(self, leaf: str, shape: tuple[int, ...]) -> Leaf | PackedPair | None:
        tensor, part = flint_names.gguf_name(leaf)
        if part == "scales":
            return None  # read together with the codes
        if part == "codes":
            full = (*shape[:-1], 2 * shape[-1])
            info = self.find(tensor, full, ("NVFP4",))
            if full[-1] % nvfp4.BLOCK_WEIGHTS:
                self.wrong[f"input width {full[-1]} is not a multiple of {nvfp4.BLOCK_WEIGHTS}"].add(tensor)
            return info and PackedPair(leaf, leaf.removesuffix("codes") + "scales", full, info)
        if part == "global_scale":
            return self.plain(leaf, shape, [Piece(tensor, shape or (1,))], ("F32",))
        return self.plain(leaf, shape, [Piece(tensor, shape)])

    def plain(self, leaf: str, shape: tuple[int, ...], pieces: list[Piece], types: tuple[str, ...] = _PLAIN) -> Leaf:
        found = [(piece, self.find(piece.tensor, piece.shape, types)) for piece in pieces]
        pairs = tuple((piece, info) for piece, info in found if info is not None)
        wide = any(info.dtype == "F32" for _, info in pairs)
        return Leaf(leaf, shape, leaf_dtype(leaf, wide, self.dtype, self.router_dtype), pairs)

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

    def report(self, complete: bool) -> None:
        """Moves what was noted to the faults. `complete`: every header was read, so that absence means missing."""
        if complete:
            scales = {name for name in self.missing if name.endswith(".scale")}
            self.faults.add_names("missing tensor", self.missing - scales)
            self.faults.add_names("missing global scale of an NVFP4 tensor", scales)
        unexpected = self.tensors.keys() - self.wanted
        explained = {name: reason for name in unexpected if (reason := flint_names.refusal(name))}
        for name, reason in sorted(explained.items()):
            self.faults.add(f"unexpected tensor: {name}: {reason}")
        self.faults.add_names("unexpected tensor", unexpected - explained.keys())
        for fault, tensors in self.wrong.items():
            self.faults.add_names(fault, tensors)
