"""Kernels compiled for GPUs that are not there: `report = compiled("h200", fn, *avals)`."""

import sys

import pytest

from pallas_kernels.deviceless import compile_for


@pytest.fixture(scope="session")
def compiled():
    """`compile_for`, where JAX has a CUDA plugin."""
    if sys.platform != "linux":
        pytest.skip("JAX's CUDA plugin exists for Linux alone")
    return compile_for
