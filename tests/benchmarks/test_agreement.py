"""Agreement of the fused step with the plain one, on a small Flint with the kernels' definitions in their place."""

import jax
import numpy as np
import pytest

from benchmarks.agreement import compared, logits, main, nudged
from benchmarks.full_size import MODELS, full_size
from modeling.flint.decode import Kernels
from modeling.kernels import with_kernels
from tests.benchmarks.small import SMALL

BATCH, CONTEXT = 3, 40


@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
def test_the_fused_step_is_within_the_bound(weight_format):
    model, cache, pages = full_size(SMALL, weight_format, BATCH, CONTEXT + 1, max_chunk=1)
    want = logits(model, cache, pages, CONTEXT)
    found = compared(want, logits(with_kernels(model, Kernels("reference")), cache, pages, CONTEXT))
    bound = compared(want, logits(nudged(model, BATCH), cache, pages, CONTEXT))
    assert 0 <= found["relative_error"] <= bound["relative_error"] < 0.1
    assert found["equal_choices"] == 1
    # Of a step that forgets a token of the cache.
    wrong = compared(want, logits(model, cache, pages, CONTEXT - 1))
    assert wrong["relative_error"] > 2 * bound["relative_error"]


def test_nudged_embeddings_are_the_next_numbers_and_the_model_stays():
    model, *_ = full_size(SMALL, "bf16", 1, 8, max_chunk=1)
    before = np.asarray(model.embed_tokens.weight[...])
    moved = np.asarray(nudged(model, 2).embed_tokens.weight[...])
    np.testing.assert_array_equal(np.asarray(model.embed_tokens.weight[...]), before)
    np.testing.assert_array_equal(moved.view(np.uint16)[:2], before.view(np.uint16)[:2] + 1)
    np.testing.assert_array_equal(moved[2:], before[2:])


def test_errors_are_relative():
    want = np.array([[3.0, 4.0], [0.0, 2.0]])
    found = compared(want, want + [[0, 0.5], [3, 0]])
    assert found == {
        "relative_error": pytest.approx(np.sqrt(9.25 / 29), rel=5e-3),
        "worst_sequence": 1.5,
        "equal_choices": 0.5,
    }


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="kernels run there")
def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setitem(MODELS, "flint", SMALL)
    with pytest.raises(SystemExit) as stop:
        main(["--batch", "1", "--context", "8"])
    assert stop.value.code == 2
    assert "GPU" in capsys.readouterr().err
