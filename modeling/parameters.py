"""A model's parameters by name, and random ones for tests and benchmarks.

A parameter's name is its path in the module tree, for example `layers.3.mlp.experts.gate_proj.weight`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def parameter_names(model: nnx.Module) -> list[str]:
    """Dotted names of the leaves of `jax.tree.leaves(model)`, in that order."""
    return [_dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(model)]


def _dotted(path: tuple[Any, ...]) -> str:
    parts = []
    for entry in path:
        part = getattr(entry, "name", getattr(entry, "key", getattr(entry, "idx", None)))
        if part not in ("value", "_value"):
            parts.append(str(part))
    return ".".join(parts)


def random_parameters[Model: nnx.Module](abstract: Model, seed: int) -> Model:
    """Fills an abstract model with random values strong enough that every part of the model moves the logits.

    Drawn on the default device, leaf by leaf, so that full-size models can be made there for benchmarks.
    """
    leaves, treedef = jax.tree.flatten(abstract)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    filled = [
        _random_leaf(name, leaf, key) for name, leaf, key in zip(parameter_names(abstract), leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, filled)


def _random_leaf(name: str, leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    shape, dtype = leaf.shape, leaf.dtype
    if name.endswith("codes"):
        return jax.random.bits(key, shape, dtype)
    if name.endswith("scales"):  # E4M3 bytes of values between 0.25 and 2
        return jax.random.randint(key, shape, 0x28, 0x40).astype(jnp.uint8)
    if name.endswith("global_scale"):
        # e2m1 has a mean square of 8.7, the block scales above one of 1.2: this brings y's variance near x's.
        return jnp.full(shape, 0.3 / math.sqrt(2048), dtype)
    noise = jax.random.normal(key, shape, jnp.bfloat16 if math.prod(shape) > 1 << 24 else jnp.float32)
    mean, deviation = _moments(name, shape)
    return (mean + deviation * noise).astype(dtype)


def _moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a leaf of plain numbers."""
    if "norm" in name:
        return 1.0, 0.2
    if name.endswith(("output_scale", "gate_scale")):
        return 1.2, 0.05
    if name.endswith("gate_bias"):
        return 0.0, 0.15
    if "sconv" in name:
        return 0.0, 0.4
    if name.startswith("embed") or name.endswith(("sinks", "rel_proj")):
        return 0.0, 1.0
    return 0.0, 1 / math.sqrt(shape[-1])
