"""Which way a model's decode steps run: as fused Pallas kernels where these can, else as plain XLA."""

from __future__ import annotations

import logging
import re
from typing import Any

import jax
import jax.numpy as jnp

from modeling.architecture import Model
from modeling.flint.decode import Kernels
from modeling.flint.model import Flint
from pallas_kernels import decode_attention, dense_gemv
from pallas_kernels.warp_tiles import MAX_TOKENS

log = logging.getLogger(__name__)

REQUESTS = ("auto", "pallas", "plain")
MIN_CAPABILITY = (9, 0)


class KernelsError(ValueError):
    """Kernels were insisted on that cannot run. The message names every reason and what to change."""


def choose_kernels(model: Model, requested: str, rows: int, device: Any) -> Kernels | None:
    """Decides how decode steps run, and says so in the log. None is plain XLA.

    Args:
        model: with arrays or with their shapes.
        requested: "auto" takes the kernels wherever they can run, "pallas" insists on them, "plain" leaves them.
        rows: sequences that decode together.
        device: the `jax.Device` that runs the steps; None for a GPU that is compiled for and need not be here.

    Raises:
        KernelsError: "pallas" was requested and cannot be.
    """
    if requested not in REQUESTS:
        raise ValueError(f"kernels must be one of {', '.join(REQUESTS)}; not {requested!r}")
    if requested == "plain":
        log.info("decode runs on plain XLA, as requested")
        return None
    problems = [*_problems_of_device(device), *_problems_of_model(model, rows)]
    if not problems:
        log.info("decode runs on Pallas kernels")
        return Kernels()
    if requested == "pallas":
        raise KernelsError(f"the Pallas decode kernels cannot run: {'; '.join(problems)}. Or leave kernels at auto")
    log.info("decode runs on plain XLA: %s", "; ".join(problems))
    return None


def with_kernels(model: Model, kernels: Kernels | None) -> Model:
    """The model with this way of running decode steps; shares the arrays of the one given, which stays as it is."""
    leaves, treedef = jax.tree.flatten(model)
    model = jax.tree.unflatten(treedef, leaves)
    if isinstance(model, Flint):
        model.decode_kernels = kernels
    elif kernels:
        raise ValueError(f"there are no kernels for {type(model).__name__}")
    return model


def _problems_of_device(device: Any) -> list[str]:
    if device is None:
        return []
    needed = "the kernels need an NVIDIA GPU of compute capability {}.{} or more".format(*MIN_CAPABILITY)
    if device.platform != "gpu":
        return [f"{needed}, and this is a {device.platform}"]
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))  # AMD's has another form
    if found and tuple(map(int, found.groups())) >= MIN_CAPABILITY:
        return []
    return [f"{needed}, and this is {device.device_kind}" + (f" of {found[0]}" if found else "")]


def _problems_of_model(model: Model, rows: int) -> list[str]:
    if not isinstance(model, Flint):
        return [f"there are none for {type(model).__name__} yet"]
    problems = []
    if model.dtype != jnp.bfloat16:
        problems.append(f"they compute in bfloat16, and dtype is {model.dtype}")
    if rows > MAX_TOKENS:
        problems.append(
            f"they take {MAX_TOKENS} sequences at once, and there are {rows} slots (several groups of {MAX_TOKENS} are "
            "not built yet)"
        )
    return problems + _problems_of_sizes(model)


def _problems_of_sizes(model: Flint) -> list[str]:
    c, problems = model.config, []
    if not decode_attention.supports(c.num_attention_heads, c.num_key_value_heads, c.head_dim):
        sizes = f"{c.num_attention_heads} heads of {c.head_dim} on {c.num_key_value_heads} key heads"
        problems.append(f"none is for {sizes}")
    columns = {c.hidden_size, c.num_attention_heads * c.head_dim}
    if not all(c.sparse_layers):
        columns.add(c.intermediate_size)
    if any(c.sparse_layers):
        columns |= {c.moe_intermediate_size, c.shared_expert_intermediate_size}
    scales = None if model.weight_format == "bf16" else ()
    refusals = (dense_gemv.supports(1, n, [dense_gemv.Matrix((), scales)]) for n in sorted(columns))
    return problems + [f"none is for {refusal}" for refusal in refusals if refusal]
