"""The training pass equals the model, learns, and is written out without loss."""

import dataclasses
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import modeling
from checkpoints.training.corpus import stream
from checkpoints.training.export import read_gguf, read_safetensors, write_gguf, write_safetensors
from checkpoints.training.forward import forward, init
from checkpoints.training.pack import Packed, pack
from checkpoints.training.shape import config as make_config
from checkpoints.training.train import Trainer, learning_rate

CONFIG = make_config()
SMALL = dataclasses.replace(
    CONFIG, num_hidden_layers=1, layer_types=CONFIG.layer_types[2:3], sparse_layers=(True,),
    hidden_size=64, num_experts=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def packed() -> Packed:
    return pack(
        [c for c in islice(stream(11), 40) if c.kind not in ("needle", "tool_call", "tool_response")], 256, rows=3
    )


@pytest.fixture(scope="module")
def params() -> dict[str, np.ndarray]:
    """Random parameters in which norms and sinks matter too."""
    rng = np.random.default_rng(0)
    drawn = {name: np.asarray(value) for name, value in init(CONFIG, 0).items()}
    return {
        name: value + 0.3 * rng.normal(size=value.shape).astype(np.float32) if value.ndim == 1 else value
        for name, value in drawn.items()
    }


@pytest.fixture(scope="module")
def folders(params, tmp_path_factory):
    bf16, nvfp4 = tmp_path_factory.mktemp("bf16"), tmp_path_factory.mktemp("nvfp4")
    write_safetensors(params, bf16)
    write_gguf(params, nvfp4)
    return bf16, nvfp4


@pytest.mark.parametrize("form", ["bf16", "nvfp4"])
def test_forward_equals_the_model_on_exported_weights(folders, packed, form):
    """Export, both loaders and the packed forward pass at once: float32 logits of every packed conversation agree."""
    folder = folders[form == "nvfp4"]
    model = modeling.load(folder, dtype=jnp.float32, progress=False)
    weights = {n: jnp.asarray(v) for n, v in (read_gguf if form == "nvfp4" else read_safetensors)(folder).items()}
    tokens, segments = packed.tokens.astype(np.int32), packed.segments.astype(np.int32)
    logits = np.asarray(jax.jit(lambda t, s: forward(weights, t, s, CONFIG)[0])(tokens, segments))
    alone = jax.jit(lambda t: model(t))
    for row, segment in list(packed.kinds)[:6]:
        here = np.flatnonzero(packed.segments[row] == segment)
        ids = np.pad(tokens[row, here], (0, 256 - len(here)))
        expected = np.asarray(alone(ids[None]))[0, : len(here)]
        error = np.linalg.norm(logits[row, here] - expected) / np.linalg.norm(expected)
        assert error < 1e-5


def test_bf16_round_trip(folders, params):
    stored = read_safetensors(folders[0])
    assert stored.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_allclose(stored[name], value, rtol=2**-8, atol=1e-30)


def test_a_few_steps_reduce_the_loss(packed):
    trainer = Trainer(init(SMALL, 0), SMALL, jnp.float32)
    losses = [float(trainer.step(packed, 3e-3, quantise=i % 2 == 1)["answer_loss"]) for i in range(10)]
    assert losses[-1] < 0.7 * losses[0]
    assert np.isfinite(losses).all()


def test_learning_rate():
    assert learning_rate(0, 0.0, 1.0, 10) == pytest.approx(0.1)
    assert learning_rate(50, 0.5, 1.0, 10) == pytest.approx(0.5)
    assert 0 < learning_rate(99, 1.0, 1.0, 10) < 0.01
