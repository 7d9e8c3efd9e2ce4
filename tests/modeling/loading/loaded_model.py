"""Looking into loaded models, and at why some are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import modeling
from modeling.architecture import Model
from modeling.inkling.model import Inkling
from modeling.layers.moe import SparseMLP
from modeling.loading import load
from modeling.parameters import parameter_names


def load_inkling(path: Path, **options: Any) -> Inkling:
    """A checkpoint that must be Inkling's."""
    model = modeling.load(path, progress=False, **options)
    assert isinstance(model, Inkling)
    return model


def leaves(model: Model) -> dict[str, jax.Array]:
    """A model's leaves by name."""
    return dict(zip(parameter_names(model), jax.tree.leaves(model), strict=True))


def assert_same_leaves(a: Model, b: Model) -> None:
    """The same names, dtypes and bits."""
    found, expected = leaves(a), leaves(b)
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name].dtype == expected[name].dtype, name
        assert np.asarray(found[name]).tobytes() == np.asarray(expected[name]).tobytes(), name


def sparse_mlp(model: Model, layer: int = 2) -> SparseMLP:
    """A layer's mixture of experts."""
    mlp = model.layers[layer].mlp
    assert isinstance(mlp, SparseMLP)
    return mlp


def refusal(path: Path, **options: Any) -> str:
    """The message that loading ends with; no tensor may be read and nothing may reach a device."""

    def untouched(*_arguments, **_options):
        raise AssertionError("a tensor was read or a device touched")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_put", untouched)
        patch.setattr(load, "fill", untouched)
        with pytest.raises(modeling.CheckpointError) as caught:
            modeling.load(path, progress=False, **options)
    return str(caught.value)
