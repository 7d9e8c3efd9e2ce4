"""Peak host memory of loading, measured from outside the allocator: in a process of its own, by the kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_writer import gguf_tensors, released_tensors, tiny_config, write_folder, write_gguf_folder
from inkling_writer import inkling_config, inkling_tensors, packed

MEASURE = """
import gc, sys
import jax, modeling

def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

modeling.load(sys.argv[1], progress=False)  # brings in everything that loading imports, and starts the backend
gc.collect()
before = status("VmRSS")
model = modeling.load(sys.argv[2], progress=False)
leaves = jax.tree.leaves(model)
print(status("VmHWM") - before, sum(x.nbytes for x in leaves), max(x.nbytes for x in leaves))
"""


class Constant:
    """Stands in for a random generator, which would take longer to fill these files than loading them."""

    def standard_normal(self, shape, dtype=np.float32):
        return np.full(shape, 0.5, dtype)

    def integers(self, low, high, shape, dtype):
        return np.full(shape, low, dtype)

    def uniform(self, low, high, shape):
        return np.full(shape, low)


def large_config(layers: int):
    return tiny_config(
        vocab_size=12288,
        hidden_size=1024,
        intermediate_size=1024,
        moe_intermediate_size=512,
        num_experts=24,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
    )


def large_inkling():
    return inkling_config(
        vocab_size=12288,
        unpadded_vocab_size=12000,
        hidden_size=1024,
        n_routed_experts=24,
        intermediate_size=512,
        dense_intermediate_size=1024,
        num_hidden_layers=8,
        local_layer_ids=[0, 1],
    )


@pytest.fixture(params=["safetensors", "gguf", "inkling", "inkling-nvfp4"])
def checkpoints(request, tmp_path) -> tuple[Path, Path]:
    """A tiny and a large checkpoint of one format."""
    tiny, small, large = tiny_config(), tmp_path / "small", tmp_path / "large"
    if request.param == "safetensors":
        config = large_config(6)
        write_folder(large, config, released_tensors(config, Constant()), shards=3)
        return write_folder(small, tiny, released_tensors(tiny)), large
    if request.param.startswith("inkling"):
        config, tiny = large_inkling(), inkling_config()
        tensors = inkling_tensors(config, Constant())
        if request.param == "inkling-nvfp4":
            tensors = packed(tensors, range(3, 8), Constant())
        write_folder(large, config, tensors, shards=3)
        return write_folder(small, tiny, packed(inkling_tensors(tiny), [3])), large
    config = large_config(17)
    write_gguf_folder(large, config, gguf_tensors(config, Constant()))
    return write_gguf_folder(small, tiny, gguf_tensors(tiny)), large


def test_peak_memory_is_the_model_and_one_leaf(checkpoints):
    """On the CPU the model is the buffers that were read into: at most a leaf and a few per cent come on top."""
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, checkpoints)], capture_output=True, text=True, check=True
    )
    peak, model, largest = map(int, result.stdout.split())
    assert model > 250e6  # large enough that a second copy of anything would show
    assert peak <= model + largest + 0.06 * model
