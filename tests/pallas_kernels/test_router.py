"""Router: the kernel against the definition, and compiled at the real models' shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router import Blocks, router
from pallas_kernels.router.shapes import FLINT, FLINT_TINY
from tests.pallas_kernels.matrix_cases import assert_close, assert_well_compiled, draw, like

# The same cases run on the GPU where there is one.
INTERPRET = jax.default_backend() != "gpu"


@dataclasses.dataclass(frozen=True)
class Case:
    num_tokens: int
    hidden: int
    num_experts: int
    dtype: type
    round_logits: bool
    blocks: Blocks | None


CASES = [
    Case(1, 136, 37, jnp.float32, False, None),
    Case(3, 200, 10, jnp.bfloat16, True, Blocks(4, 4)),
    Case(8, 96, 5, jnp.float32, True, Blocks(3, 2)),
    Case(5, 256, 9, jnp.bfloat16, False, Blocks(1, 8)),
]


def draw_case(case, seed=0):
    rng = np.random.default_rng(seed)
    shape = (case.num_tokens, case.hidden)
    gate = draw(rng, (case.num_experts, case.hidden), 0.1, case.dtype)
    return draw(rng, shape), draw(rng, shape, 3), 1 + draw(rng, shape[1:], 0.3), gate


@functools.partial(jax.jit, static_argnames=("case", "implementation"))
def run(*args, case, implementation):
    options = dict(norm_eps=1e-6, round_logits=case.round_logits, blocks=case.blocks)
    return router(*args, **options, implementation=implementation, interpret=INTERPRET)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.num_tokens}-{case.num_experts}")
def test_kernel_is_the_reference(case):
    args = draw_case(case)
    got, want = (run(*args, case=case, implementation=name) for name in ("triton", "reference"))
    logits, normed, stream = got
    if case.round_logits:
        assert logits.dtype == want[0].dtype == jnp.float32
        rounded = [x.astype(jnp.bfloat16) for x in (logits, want[0])]
        np.testing.assert_array_equal(logits, rounded[0].astype(jnp.float32))
        assert_close(*rounded)
    else:
        assert_close(logits, want[0])
        assert (np.asarray(logits.astype(jnp.bfloat16).astype(jnp.float32)) != logits).mean() > 0.9
    assert_close(normed, want[1])
    np.testing.assert_array_equal(stream, want[2])


def test_logits_are_of_the_rounded_norm():
    """By float64: the norm of the unrounded sum, rounded, times a gate that bfloat16 could not hold."""
    case = Case(3, 64, 7, jnp.float32, False, Blocks(2, 1))
    x, residual, weight, gate = draw_case(case, 1)
    logits, normed, _ = run(x, residual, weight, gate, case=case, implementation="triton")
    total = np.asarray(x).astype(np.float64) + np.asarray(residual).astype(np.float64)
    scale = 1 / np.sqrt((total**2).mean(axis=1, keepdims=True) + 1e-6)
    want = (total * scale * np.asarray(weight).astype(np.float64)).astype(np.float32).astype(jnp.bfloat16)
    assert_close(normed, want)
    assert_close(logits, (np.asarray(normed).astype(np.float64) @ np.asarray(gate, np.float64).T).astype(np.float32))


@pytest.mark.parametrize(
    "target, shape, num_tokens, dtype",
    [
        ("h200", FLINT, 1, jnp.bfloat16),
        ("h200", FLINT, 2, jnp.float32),
        ("h200", FLINT, 8, jnp.float32),
        ("h200", FLINT_TINY, 8, jnp.float32),
        ("gb200", FLINT, 8, jnp.bfloat16),
    ],
    ids=lambda value: f"{value.hidden}x{value.num_experts}" if dataclasses.is_dataclass(value) else None,
)
def test_one_kernel_at_the_models_shapes(target, shape, num_tokens, dtype, compiled):
    x = like((num_tokens, shape.hidden))
    fn = functools.partial(router, norm_eps=1e-6, round_logits=dtype == jnp.bfloat16)
    report = compiled(target, fn, x, x, like((shape.hidden,)), like((shape.num_experts, shape.hidden), dtype))
    assert_well_compiled(report, {"router": 1}, without_matrices=["router"])
    if shape is FLINT:  # a row of the gate at once, 16 bytes a lane
        assert "ld.global.v4.b32" in report.code["router"].ptx
