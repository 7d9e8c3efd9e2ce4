"""No unmasked access outside of an array. Interpreted, such loads are clamped and such stores dropped: nobody sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.moe import Blocks, down, gate_up, new_counters
from tests.pallas_kernels.matrix_cases import draw, draw_matrix

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="what is interpreted is watched")
TOKENS, EXPERTS, TOP_K = 3, 8, 2
SMALLEST = Blocks(1, 1, 1, 1)


@pytest.fixture
def outside(monkeypatch):
    """What was accessed outside: (kind, the array's shape), when the effects have run."""
    found = []

    def watched(kind, access):
        def run(view, *args, mask=None, **options):
            indices, shape = view.transforms[-1].indices, view.ref.shape
            wrong = jnp.bool_(False)
            for index, size in zip(indices, shape, strict=True):
                if not hasattr(index, "start"):  # no slice
                    wrong = wrong | (index < 0) | (index >= size)
            wrong = jnp.any(wrong if mask is None else wrong & mask)
            jax.debug.callback(lambda any_: found.append((kind, shape)) if any_ else None, wrong)
            return access(view, *args, mask=mask, **options)

        return run

    for kind in ("load", "store"):
        monkeypatch.setattr(plt, kind, watched(kind, getattr(plt, kind)))
    yield found
    jax.clear_caches()  # of kernels traced with the watch


def block(logits, hidden=32, blocks=SMALLEST, implementation="triton"):
    """Both halves of an MoE block: the output and the counters."""
    rng, inner = np.random.default_rng(0), 32
    x = draw(rng, (TOKENS, hidden))
    gate, up = (draw_matrix(rng, (EXPERTS, inner, hidden), "bf16") for _ in range(2))
    shared_gate, shared_up = (draw_matrix(rng, (inner, hidden), "bf16") for _ in range(2))
    matrices = draw_matrix(rng, (EXPERTS, hidden, inner), "bf16"), draw_matrix(rng, (hidden, inner), "bf16")
    how = dict(top_k=TOP_K, blocks=blocks, implementation=implementation, interpret=implementation == "triton")
    routing = dict(normalise=True, round_weights=False)
    first = gate_up(x, jnp.asarray(logits), (gate, up), (shared_gate, shared_up), **routing, **how)
    out, counters = down(*first, new_counters(hidden), *matrices, **how)
    jax.effects_barrier()
    return np.asarray(out, np.float32), np.asarray(counters)


def logits_of(wrong):
    """Of three tokens, the second of which has `wrong` and shares no expert with the others."""
    logits = np.random.default_rng(1).standard_normal((TOKENS, EXPERTS)).astype(np.float32)
    logits[:, 4:] -= 9
    if wrong is not None:
        logits[1] = np.where(np.arange(EXPERTS) >= 6, wrong, -np.inf)
    return logits


@pytest.mark.parametrize("wrong", [None, np.nan, -200.0], ids=["none", "nan", "no weight"])
def test_a_sequence_gone_wrong_leaves_the_others(wrong, outside):
    """NaN logits; or scores of 0, so that its experts have no token at all."""
    logits = logits_of(wrong)
    (out, counters), (want, _) = block(logits), block(logits, implementation="reference")
    assert not outside
    assert not counters.any()
    np.testing.assert_allclose(out[::2], want[::2], rtol=2**-6, atol=2**-6)
    np.testing.assert_array_equal(np.isnan(out[1]), np.isnan(want[1]))
    assert np.isnan(out[1]).all() == (wrong is not None and np.isnan(wrong))


def test_rows_that_end_within_a_block(outside):
    out, counters = block(logits_of(None), hidden=40, blocks=Blocks(3, 1, 4, 1))
    assert not outside and not counters.any() and np.isfinite(out).all()


def test_an_access_outside_is_seen(outside):
    block(logits_of(None))
    assert not outside

    def kernel(x_ref, out_ref):
        plt.store(out_ref.at[jnp.arange(4)], plt.load(x_ref.at[jnp.arange(4) + 1]))

    pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4,), jnp.float32), interpret=True)(jnp.ones(4))
    jax.effects_barrier()
    assert outside == [("load", (4,))]
