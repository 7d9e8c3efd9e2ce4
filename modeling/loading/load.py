"""From a path to a filled model."""

from __future__ import annotations

import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from modeling.architecture import Model, architecture_of
from modeling.errors import CheckpointError
from modeling.loading import orbax
from modeling.loading.faults import Faults
from modeling.loading.plan import Plan, make_plan
from modeling.loading.read import Reader, check_global_scales
from modeling.loading.source import Checkpoint, find
from modeling.loading.tensors import Files
from modeling.parameters import parameter_names
from sharding.rules import PRESETS, check_dimensions, mesh_shardings

log = logging.getLogger(__name__)


def load(
    path: str | Path,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    text_only: bool = False,
    router_dtype: str | None = None,
    progress: bool = True,
    config: str | Path | None = None,
) -> Model:
    """See `modeling.load`."""
    checkpoint = find(path, config)
    compute = compute_dtype(dtype, checkpoint)
    if router_dtype not in (None, "float32", "bfloat16"):
        raise CheckpointError(f"router_dtype must be float32, bfloat16 or None, not {router_dtype!r}")
    if checkpoint.kind == "orbax":
        abstract = orbax.abstract_model(checkpoint, compute, router_dtype, text_only)
        return orbax.restore(checkpoint.path, abstract, shardings(abstract, mesh))
    plan = make_plan(checkpoint, compute, router_dtype, text_only)
    return fill(plan, checkpoint.path, shardings(plan.model, mesh), progress)


def shardings(model: Model, mesh: Mesh | None) -> dict[str, NamedSharding] | None:
    """Where each leaf of a model goes on a mesh, by leaf name; None without a mesh.

    Raises:
        sharding.rules.ShardingError: a dimension does not divide.
    """
    if mesh is None:
        return None
    rules, names = PRESETS["tp"], architecture_of(model.config).names
    check_dimensions(mesh, rules, names.dimensions(model.config))
    leaves = zip(parameter_names(model), jax.tree.leaves(model), strict=True)
    arrays = {name: (names.logical_axes(name, leaf.ndim), leaf.shape) for name, leaf in leaves}
    return mesh_shardings(mesh, rules, arrays)


def compute_dtype(dtype: Any, checkpoint: Checkpoint) -> jnp.dtype:
    """The dtype asked for, else the config's where it is one of the two supported, else bfloat16.

    Raises:
        CheckpointError: another dtype was asked for.
    """
    if dtype is None:
        raw, nested = checkpoint.raw_config, checkpoint.raw_config.get("text_config")
        blocks = [raw, nested] if isinstance(nested, dict) else [raw]
        stated = [block[key] for block in blocks for key in ("dtype", "torch_dtype") if block.get(key)]
        return jnp.dtype(jnp.float32 if stated[:1] == ["float32"] else jnp.bfloat16)
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found not in (jnp.float32, jnp.bfloat16):
        raise CheckpointError(f"dtype must be float32 or bfloat16, not {dtype!r}")
    return found


def fill(plan: Plan, path: Path, shardings: dict[str, NamedSharding] | None = None, progress: bool = True) -> Model:
    """Reads what a plan names.

    Args:
        path: what to call the checkpoint in messages. shardings: by leaf name; None for the default device.

    Raises:
        CheckpointError: a scale is unusable, or a file changed while being read.
    """
    treedef, order = jax.tree.structure(plan.model), parameter_names(plan.model)
    tensors = plan.tensors
    leaves: dict[str, jax.Array] = {}
    total = sum(info.nbytes for info in tensors.values())
    with Files() as files, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool, _bar(total, progress) as bar:
        for info in tensors.values():
            files.open(info.path)
        check_global_scales(plan, files, path)
        reader = Reader(files, pool, bar.update)
        for target in plan.targets:
            for name, array in reader.read(target):
                # After the first unusable tensor the rest is only scanned, so that one message names all of them.
                if reader.unusable:
                    leaves.clear()
                else:
                    leaves[name] = place(array, shardings[name] if shardings else None)
                del array
    faults = Faults(path)
    faults.add_names("block scale that is no E4M3 number (0xFF, or 0x7F outside GGUF)", reader.unusable)
    faults.raise_any("no model was made")
    if reader.rounded:
        log.warning("rounding from float32 to bfloat16 lost bits of %s", ", ".join(reader.rounded))
    return jax.tree.unflatten(treedef, [leaves[name] for name in order])


def place(array: np.ndarray, sharding: NamedSharding | None) -> jax.Array:
    """Puts a host buffer on the device, or its shards on theirs, and waits, so that the buffer can be freed.

    A CPU device adopts an aligned buffer without copying it.
    """
    if sharding is None:
        placed = jax.device_put(array)
    else:
        placed = jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
    return placed.block_until_ready()


def _bar(total: int, progress: bool):
    from tqdm import tqdm

    # A bar redrawn often is unreadable in a log file.
    every = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(
        total=total, unit="B", unit_scale=True, desc="loading", file=sys.stderr, disable=not progress, mininterval=every
    )
