"""From an array's logical axes to a mesh: which dimension is split over which devices.

A model names the axes of its arrays by what they mean ("heads", "mlp", ...); a preset, one small table, says which of
them are split. A dimension that is not listed is replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Rules = Mapping[str, str]  # logical axis -> mesh axis

# Tensor parallel: every matrix is split along the axis that keeps a layer's activations whole between its two
# matrices. Experts are split inside, not dealt out, so that every device reads an equal share of the selected ones.
PRESETS: dict[str, Rules] = {
    "tp": {"vocab": "tp", "heads": "tp", "kv_heads": "tp", "mlp": "tp", "expert_mlp": "tp"},
}


class ShardingError(ValueError):
    """A model cannot be spread over a mesh. The message names every dimension that does not divide."""


class Dimension(NamedTuple):
    """A number of indivisible units along a logical axis, for example heads, which are never cut."""

    axis: str
    name: str  # what a user would call it
    size: int


def mesh_shardings(
    mesh: Mesh, rules: Rules, arrays: Mapping[str, tuple[tuple[str | None, ...], tuple[int, ...]]]
) -> dict[str, NamedSharding]:
    """The sharding of each array.

    Args:
        mesh: its axis that the rules name is used; a mesh of one axis is used whatever the axis is called.
        arrays: name -> (logical axis of each dimension or None, shape).

    Raises:
        ShardingError: a dimension is not a multiple of the devices it is split over, or the mesh has no such axis.
    """
    axis_of = _mesh_axes(mesh, rules)
    # Models leave it to the compiler to place intermediate results, which explicit mesh axes do not allow.
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    faults, shardings = {}, {}
    for name, (axes, shape) in arrays.items():
        spec = [axis_of.get(axis) if axis is not None else None for axis in axes]
        for i, (axis, mesh_axis, size) in enumerate(zip(axes, spec, shape, strict=True)):
            if mesh_axis is not None and size % mesh.shape[mesh_axis]:
                # One line for all the layers alike.
                faults.setdefault(
                    (axis, size), f"{axis}, dimension {i} of {name}, {_indivisible(size, mesh, mesh_axis)}"
                )
        shardings[name] = NamedSharding(mesh, PartitionSpec(*spec))
    _raise(faults.values())
    return shardings


def check_dimensions(mesh: Mesh, rules: Rules, dimensions: Iterable[Dimension]) -> None:
    """Refuses a mesh that would cut through a head or leave devices with unequal shares.

    Raises:
        ShardingError: names every dimension that does not divide.
    """
    axis_of = _mesh_axes(mesh, rules)
    _raise(
        f"{d.name} = {_indivisible(d.size, mesh, axis_of[d.axis])}"
        for d in dimensions
        if d.axis in axis_of and d.size % mesh.shape[axis_of[d.axis]]
    )


def _mesh_axes(mesh: Mesh, rules: Rules) -> Rules:
    if len(mesh.axis_names) == 1:
        return {axis: mesh.axis_names[0] for axis in rules}
    if absent := sorted(set(rules.values()) - set(mesh.axis_names)):
        raise ShardingError(f"the mesh has axes {', '.join(mesh.axis_names)}, but the rules need {', '.join(absent)}")
    return rules


def _indivisible(size: int, mesh: Mesh, mesh_axis: str) -> str:
    return f"{size} does not divide over the {mesh.shape[mesh_axis]} devices of mesh axis {mesh_axis!r}"


def _raise(faults: Iterable[str]) -> None:
    if lines := list(faults):
        raise ShardingError("the model cannot be spread over this mesh:\n  " + "\n  ".join(lines))
