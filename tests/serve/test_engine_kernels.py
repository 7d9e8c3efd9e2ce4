"""The engine with the fused decode step: what is refused, what is said, and the same tokens as without."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_flint

from modeling.flint.config import FULL, SLIDING
from modeling.flint.decode import Kernels
from modeling.kernels import KernelsError
from serve import engine as engine_module
from serve import generate
from serve.engine import Engine, EngineConfig
from serve.request import Request, SamplingParams

GPU = jax.default_backend() == "gpu"
OPTIONS = dict(num_slots=3, prefill_chunks=(16,), max_model_len=96, decode_steps=4, max_queue=8, progress=False)
needs_no_gpu = pytest.mark.skipif(GPU, reason="the kernels can run here")


@pytest.fixture(scope="module")
def model():
    kinds = dict(num_hidden_layers=2, layer_types=(FULL, SLIDING), sparse_layers=(False, True))
    return tiny_flint(dtype=jnp.bfloat16, max_position_embeddings=96, **kinds)


def answers(model, kernels: str) -> list[tuple[int, ...]]:
    """Six requests on three slots, greedy and sampled: slots stand idle now and then, and change hands."""
    sampled = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, seed=5, max_tokens=9)
    rules = [SamplingParams(temperature=0.0, max_tokens=n) for n in (12, 3, 20)] + [sampled] * 3
    prompts = [np.random.default_rng(n).integers(0, 128, n).tolist() for n in (1, 15, 16, 17, 40, 70)]
    requests = [Request(str(i), tuple(ids), rule) for i, (ids, rule) in enumerate(zip(prompts, rules, strict=True))]
    with Engine(model, EngineConfig(**OPTIONS, kernels=kernels)) as engine:
        done = {one.request_id: one.token_ids for one in engine.generate(requests)}
        assert engine.compiles_since_ready == 0
    return [done[str(i)] for i in range(len(requests))]


def test_answers_are_the_plain_ones(model, monkeypatch):
    plain = answers(model, "plain")
    if not GPU:
        monkeypatch.setattr(engine_module, "choose_kernels", lambda *_: Kernels("reference"))
    assert answers(model, "pallas") == plain
    assert model.decode_kernels is None  # the caller's model stays as it was


@needs_no_gpu
def test_kernels_that_cannot_run_are_refused(model):
    with pytest.raises(KernelsError, match=r"the kernels need an NVIDIA GPU .* and this is a cpu"):
        Engine(model, EngineConfig(**OPTIONS, kernels="pallas"))


@needs_no_gpu
def test_the_log_says_once_why_decode_is_plain(model, caplog):
    caplog.set_level(logging.INFO, "modeling.kernels")
    Engine(model, EngineConfig(**OPTIONS, kernels="auto"))
    [message] = [record.getMessage() for record in caplog.records if record.name == "modeling.kernels"]
    assert message.startswith("decode runs on plain XLA: the kernels need an NVIDIA GPU")


@needs_no_gpu
def test_the_command_line_refuses_kernels_that_cannot_run(capsys):
    assert generate.main(["--kernels", "pallas", "--max-model-len", "128", "hello"]) == 2
    [sentence] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "the Pallas decode kernels cannot run: the kernels need an NVIDIA GPU" in sentence
