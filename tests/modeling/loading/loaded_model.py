"""Looking into loaded models."""

from __future__ import annotations

import jax
import numpy as np

from modeling.flint.model import Flint
from modeling.layers.moe import SparseMLP
from modeling.parameters import parameter_names


def leaves(model: Flint) -> dict[str, jax.Array]:
    """A model's leaves by name."""
    return dict(zip(parameter_names(model), jax.tree.leaves(model), strict=True))


def assert_same_leaves(a: Flint, b: Flint) -> None:
    """The same names, dtypes and bits."""
    found, expected = leaves(a), leaves(b)
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name].dtype == expected[name].dtype, name
        assert np.asarray(found[name]).tobytes() == np.asarray(expected[name]).tobytes(), name


def sparse_mlp(model: Flint, layer: int = 2) -> SparseMLP:
    """A layer's mixture of experts."""
    mlp = model.layers[layer].mlp
    assert isinstance(mlp, SparseMLP)
    return mlp
