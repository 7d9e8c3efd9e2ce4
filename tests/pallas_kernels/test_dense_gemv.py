"""Dense GEMV: the kernel against the definition, and compiled at the real models' shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense_gemv import Blocks, dense_gemv, supports
from pallas_kernels.dense_gemv.shapes import (
    FLINT_DOWN,
    FLINT_GATE_UP,
    FLINT_HEAD,
    FLINT_O,
    FLINT_QKV,
    FLINT_TINY_QKV,
    Shape,
)
from tests.pallas_kernels.matrix_cases import (
    assert_close,
    assert_loads_come_first,
    assert_well_compiled,
    draw,
    draw_matrix,
    like,
    like_matrix,
    with_layouts,
)

# The same cases run on the GPU where there is one.
INTERPRET = jax.default_backend() != "gpu"


@dataclasses.dataclass(frozen=True)
class Case:
    weight_format: str
    num_tokens: int
    columns: int
    rows: tuple[int, ...]
    blocks: Blocks | None
    norm: bool = False
    residual: bool = False
    activation: str | None = None
    out_dtype: type = jnp.bfloat16


# Rows that fill neither a block nor a row group, columns that do not fill a step, a norm on either path for one token.
CASES = [
    Case("nvfp4", 1, 400, (40, 16, 7), Blocks(2, 2), norm=True, residual=True),
    Case("nvfp4", 1, 400, (16, 9), Blocks(1, 1), norm=True, residual=True),
    Case("nvfp4", 1, 64, (32,), None, out_dtype=jnp.float32),
    Case("nvfp4", 1, 272, (21, 21), Blocks(3, 1), activation="swiglu"),
    Case("nvfp4", 3, 208, (40, 40), Blocks(3, 2), norm=True, residual=True, activation="swiglu"),
    Case("nvfp4", 8, 592, (27, 33), Blocks(5, 2), out_dtype=jnp.float32),
    Case("bf16", 1, 264, (24, 40), Blocks(2, 4), norm=True),
    Case("bf16", 1, 328, (19, 19), Blocks(1, 1), norm=True, residual=True, activation="swiglu"),
    Case("bf16", 2, 72, (33,), None, out_dtype=jnp.float32),
    Case("bf16", 5, 136, (20, 50), Blocks(5, 2), norm=True, residual=True),
]


def draw_case(case, seed=0):
    rng = np.random.default_rng(seed)
    shape = (case.num_tokens, case.columns)
    return (
        draw(rng, shape),
        draw(rng, shape, 3) if case.residual else None,
        1 + draw(rng, shape[1:], 0.3) if case.norm else None,
        [draw_matrix(rng, (rows, case.columns), case.weight_format) for rows in case.rows],
    )


@functools.partial(jax.jit, static_argnames=("case", "implementation"))
def run(x, residual, norm_weight, matrices, case, implementation):
    return dense_gemv(
        x,
        matrices,
        residual=residual,
        norm_weight=norm_weight,
        norm_eps=1e-6,
        activation=case.activation,
        out_dtype=case.out_dtype,
        blocks=case.blocks,
        implementation=implementation,
        interpret=INTERPRET,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.weight_format}-{case.num_tokens}-{case.columns}")
def test_kernel_is_the_reference(case):
    args = draw_case(case)
    got, want = (run(*args, case, name) for name in ("triton", "reference"))
    assert len(got) == len(want) == 1 + case.residual
    # Gate, up and their product are rounded each.
    assert_close(got[0], want[0], steps=3 if case.activation else 1)
    for stream, expected in zip(got[1:], want[1:], strict=True):
        np.testing.assert_array_equal(stream, expected)


def test_the_reference_is_a_product():
    """In float64, from the formats' own tables."""
    case = CASES[2]
    x, *_, [matrix] = draw_case(case)
    codes = np.asarray(matrix.weight)[..., None] >> 4 * np.arange(4) & 15
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8] * np.where(codes < 8, 1, -1)
    byte = np.asarray(matrix.scales).astype(np.int64)
    scale = np.where(byte < 8, byte * 2.0**-9, (8 + byte % 8) * 2.0 ** (byte // 8 - 10))
    weight = magnitude.reshape(32, 64) * scale.repeat(16, axis=1) * np.float64(matrix.global_scale)
    want = np.asarray(x).astype(np.float64) @ weight.T
    [got] = run(x, None, None, [matrix], case, "reference")
    assert_close(got, want.astype(np.float32))


def test_the_norm_is_of_the_unrounded_sum():
    """A residual far above x, so that their rounded sum is the residual alone."""
    x, weight = jnp.full((1, 64), 2.0**-5, jnp.bfloat16), jnp.ones(64, jnp.bfloat16)
    residual = jnp.asarray([[16.0, -16.0] * 32], jnp.bfloat16)
    [matrix] = draw_case(Case("bf16", 1, 64, (16,), None))[-1]
    case = Case("bf16", 1, 64, (16,), None, out_dtype=jnp.float32)
    got, stream = run(x, residual, weight, [matrix], case, "triton")
    np.testing.assert_array_equal(stream, residual)
    total = (np.asarray(residual) + np.asarray(x).astype(np.float32)).astype(np.float64)
    normed = (total / np.sqrt((total**2).mean() + 1e-6)).astype(np.float32).astype(jnp.bfloat16)
    assert not np.array_equal(normed, np.sign(normed))
    assert_close(got, (normed.astype(np.float64) @ np.asarray(matrix.weight).astype(np.float64).T).astype(np.float32))


def test_what_the_kernel_does_not_take_is_refused():
    assert supports(8, 64, [like_matrix((16, 64), "nvfp4")]) is None
    for num_tokens, columns, weight_format, problem in [
        (9, 64, "nvfp4", "9 tokens (at most 8)"),
        (1, 68, "bf16", "68 columns (a multiple of 8)"),
        (1, 72, "nvfp4", "72 columns (a multiple of 16)"),
    ]:
        matrix = like_matrix((16, columns), weight_format)
        assert supports(num_tokens, columns, [matrix]) == problem
        with pytest.raises(ValueError, match=r"no kernel for .*implementation='reference'"):
            jax.eval_shape(lambda x, m: dense_gemv(x, [m]), like((num_tokens, columns)), matrix)


def report_of(compiled, target, shape, weight_format, num_tokens):
    """A real model's layer, compiled."""
    x, weight = like((num_tokens, shape.columns)), like((shape.columns,)) if shape.norm else None
    matrices = [like_matrix((rows, shape.columns), weight_format) for rows in shape.rows]

    def fn(x, residual, weight, matrices):
        return dense_gemv(
            x,
            matrices,
            residual=residual,
            norm_weight=weight,
            norm_eps=1e-6,
            activation="swiglu" if shape.swiglu else None,
            out_dtype=jnp.float32 if shape.float32 else jnp.bfloat16,
        )

    return with_layouts(compiled, target, fn, x, x if shape.norm else None, weight, matrices)


def shape_id(value):
    return f"{value.columns}x{sum(value.rows)}" if isinstance(value, Shape) else None


@pytest.mark.parametrize(
    "target, shape, weight_format, num_tokens",
    [
        ("h200", FLINT_QKV, "nvfp4", 1),
        ("h200", FLINT_QKV, "nvfp4", 8),
        ("h200", FLINT_QKV, "bf16", 1),
        ("h200", FLINT_QKV, "bf16", 8),
        ("h200", FLINT_O, "nvfp4", 2),
        ("h200", FLINT_GATE_UP, "nvfp4", 2),
        ("h200", FLINT_GATE_UP, "bf16", 2),
        ("h200", FLINT_DOWN, "nvfp4", 8),
        ("h200", FLINT_HEAD, "bf16", 1),
        ("h200", FLINT_TINY_QKV, "nvfp4", 1),
        ("gb200", FLINT_QKV, "nvfp4", 1),
        ("gb200", FLINT_O, "bf16", 8),
    ],
    ids=shape_id,
)
def test_one_kernel_at_the_models_shapes(target, shape, weight_format, num_tokens, compiled):
    report = report_of(compiled, target, shape, weight_format, num_tokens)
    assert_well_compiled(report, {"dense_gemv": 1}, wide=shape.columns % 1024 == 0)


@pytest.mark.parametrize("shape", [FLINT_O, FLINT_HEAD], ids=shape_id)
@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
def test_weights_are_asked_for_before_the_first_product(shape, weight_format, compiled):
    report = report_of(compiled, "h200", shape, weight_format, 1)
    assert_loads_come_first(report.code["dense_gemv"].ptx)


def test_a_residual_without_a_norm_is_refused():
    x = jnp.zeros((1, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="give norm_weight too"):
        dense_gemv(x, [like_matrix((16, 64), "bf16")], residual=x)
