"""Converted checkpoints: a model's leaves as an Orbax checkpoint, which restores onto any mesh, and a manifest.

A folder holds `state/` (Orbax), `firesteel.json` (the manifest, written last: without it a folder is unfinished),
and the source's config and tokenizer files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from modeling.architecture import Model, architecture_of
from modeling.config import read_json
from modeling.errors import CheckpointError
from modeling.loading import gguf
from modeling.loading.faults import Faults
from modeling.loading.plan import Plan, is_packed, leaf_dtype, make_abstract
from modeling.loading.source import MANIFEST, SIDE_FILES, Checkpoint
from modeling.parameters import parameter_names

log = logging.getLogger(__name__)

FORMAT = 3  # of the manifest and of the meaning of the leaves; raised when either changes
_STATE = "state"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What `firesteel.json` says.

    Attributes:
        options: what the model is made with beside config and dtype.
        leaves: dtype name and shape of each leaf.
        source: `fingerprint` of what was converted, and its weight files' sizes in bytes.
    """

    format: int
    options: dict[str, Any]
    leaves: dict[str, tuple[str, tuple[int, ...]]]
    source: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises: CheckpointError: not a manifest of this format."""
        raw = read_json(folder / MANIFEST)
        if raw.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder / MANIFEST} is of format {raw.get('format')!r}; this version reads format {FORMAT}: convert "
                "the checkpoint again"
            )
        try:
            raw["leaves"] = {
                name: (str(dtype), tuple(map(int, shape))) for name, (dtype, shape) in raw["leaves"].items()
            }
            raw["options"] = {name: _tuples(value) for name, value in raw["options"].items()}
            manifest = cls(**raw)
        except (TypeError, ValueError, KeyError, AttributeError):
            raise CheckpointError(f"{folder / MANIFEST} is not a manifest of a converted checkpoint") from None
        return manifest


def _tuples(value: Any) -> Any:
    """A JSON value with its lists as tuples, as models hold them."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def save(model: Model, plan: Plan, checkpoint: Checkpoint, folder: Path) -> None:
    """Writes a loaded checkpoint as a converted one.

    Args:
        model: filled, in on-disk precision. plan, checkpoint: what it was loaded by and from.
        folder: absent or empty.
    """
    import orbax.checkpoint as ocp

    folder.mkdir(parents=True, exist_ok=True)
    leaves = dict(zip(parameter_names(model), jax.tree.leaves(model), strict=True))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve() / _STATE, leaves)
    for pattern in SIDE_FILES:
        for file in sorted(checkpoint.config_folder.glob(pattern)):
            target = folder / file.relative_to(checkpoint.config_folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
    if checkpoint.kind == "gguf" and not [file for name in ("tokenizer.json", "*.model") for file in folder.glob(name)]:
        # The tokenizer may be inside the GGUF file: keep its metadata, which a server reads it from.
        (folder / "metadata.gguf").write_bytes(gguf.metadata_only(checkpoint.files[0]))
    manifest = Manifest(
        format=FORMAT,
        options=plan.options,
        leaves={name: (str(leaf.dtype), leaf.shape) for name, leaf in leaves.items()},
        source=_fingerprint(plan),
    )
    (folder / MANIFEST).write_text(json.dumps(dataclasses.asdict(manifest), indent=1) + "\n", encoding="utf-8")


def _fingerprint(plan: Plan) -> dict[str, Any]:
    """Tells one source from another by everything its headers say; the weights themselves are not hashed."""
    tensors = sorted(plan.tensors.values(), key=lambda info: info.name)
    files = {path.name: path.stat().st_size for path in sorted({info.path for info in tensors})}
    digest = hashlib.sha256(json.dumps(files).encode())
    for info in tensors:
        digest.update(f"{info.name} {info.dtype} {info.shape} {info.path.name} {info.offset}\n".encode())
    return {"fingerprint": f"sha256:{digest.hexdigest()}", "files": files}


def abstract_model(
    checkpoint: Checkpoint, dtype: jnp.dtype, router_dtype: str | None, text_only: bool = False
) -> Model:
    """The model a converted checkpoint restores to, its leaves `jax.ShapeDtypeStruct`.

    Raises:
        CheckpointError: the manifest is unusable, or its leaves are not the config's.
    """
    folder, names = checkpoint.path, architecture_of(checkpoint.config).names
    manifest = Manifest.read(folder)
    try:
        abstract = make_abstract(checkpoint.config, dtype, manifest.options, router_dtype, text_only)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST} does not fit the model of config.json: {error}") from None
    structs, treedef = jax.tree.flatten(abstract)
    expected = dict(zip(parameter_names(abstract), structs, strict=True))
    unexpected = manifest.leaves.keys() - expected.keys()
    if text_only:
        unexpected = {name for name in unexpected if name.split(".")[0] not in names.TOWERS}
    faults = Faults(folder)
    faults.add_names("missing leaf", expected.keys() - manifest.leaves.keys())
    faults.add_names("unexpected leaf", unexpected)
    for name in sorted(expected.keys() & manifest.leaves.keys()):
        disk, shape = manifest.leaves[name]
        if shape != expected[name].shape:
            faults.add(f"shape {list(shape)}, expected {list(expected[name].shape)}: {name}")
        if disk not in ((str(expected[name].dtype),) if is_packed(expected[name]) else ("float32", "bfloat16")):
            faults.add(f"type {disk}: {name}")
    if not (folder / _STATE).is_dir():
        faults.add(f"{_STATE}/, which holds the weights, is missing")
    faults.raise_any("nothing was read")
    kinds = {
        name: struct.dtype
        if is_packed(struct)
        else leaf_dtype(names, name, manifest.leaves[name][0] == "float32", dtype, router_dtype)
        for name, struct in expected.items()
    }
    if any(names.is_router(name) and str(kinds[name]) != manifest.leaves[name][0] for name in kinds):
        log.warning("%s: the routers are rounded from float32 to bfloat16", folder)
    for notice in names.notices(checkpoint.config, manifest.options, text_only):
        log.warning("%s: %s", folder, notice)
    filled = [jax.ShapeDtypeStruct(struct.shape, kinds[name]) for name, struct in expected.items()]
    return jax.tree.unflatten(treedef, filled)


def restore(folder: Path, abstract: Model, shardings: dict[str, NamedSharding] | None) -> Model:
    """Reads the leaves straight to their devices, each reading only its shards, whatever mesh they were saved from.

    Args:
        abstract: of `abstract_model`. shardings: by leaf name; None for the default device.

    Raises:
        CheckpointError: the Orbax checkpoint cannot be read.
    """
    import orbax.checkpoint as ocp

    names = parameter_names(abstract)
    structs, treedef = jax.tree.flatten(abstract)
    default = jax.device_put(np.zeros(())).sharding  # honours jax_default_device
    target = {
        name: jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=shardings[name] if shardings else default)
        for name, struct in zip(names, structs, strict=True)
    }
    try:
        arguments = ocp.args.PyTreeRestore(
            item=target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,  # towers may be left where they are
        )
        with ocp.PyTreeCheckpointer() as checkpointer:
            leaves = checkpointer.restore(folder.resolve() / _STATE, args=arguments)
    except Exception as error:  # tensorstore and Orbax raise many kinds for files that are absent or damaged
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{folder / _STATE} cannot be restored, it may be damaged: {reason}") from error
    return jax.tree.unflatten(treedef, [leaves[name] for name in names])
