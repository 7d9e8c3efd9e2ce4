"""MoE block of a decode step: the kernels against the definition, and compiled at the real models' shapes.

What must not be read is NaN: experts that no token selected, activations of slots without an expert.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.dense_gemv.reference import accumulate
from pallas_kernels.moe import Blocks, down, gate_up, new_counters
from pallas_kernels.moe.shapes import FLINT, FLINT_TINY
from pallas_kernels.warp_tiles import ROW_GROUP, Matrix
from tests.pallas_kernels.matrix_cases import (
    assert_close,
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
    weight_format: str = "nvfp4"
    num_tokens: int = 1
    hidden: int = 144
    inner: int = 48
    shared_inner: int = 80
    num_experts: int = 37
    top_k: int = 3
    normalise: bool = True
    round_weights: bool = False
    blocks: Blocks | None = None

    @property
    def num_slots(self) -> int:
        return min(self.num_tokens * self.top_k, self.num_experts)

    def routing(self) -> dict:
        return dict(top_k=self.top_k, normalise=self.normalise, round_weights=self.round_weights)


# Rows that fill neither a block nor a row group, columns that do not fill a step, more experts than a warp has lanes or
# fewer, one warp an expert and several, all experts in flight at once or a few, the last of them missing.
CASES = [
    Case(blocks=Blocks(1, 1, 1, 2)),
    Case("bf16", 1, 136, 40, 24, 9, top_k=4, normalise=False, round_weights=True, blocks=Blocks(2, 2, 3, 4)),
    Case(num_tokens=2, hidden=272, inner=272, shared_inner=32, top_k=2, blocks=Blocks(1, 2, 2, 4)),
    Case("bf16", 5, 104, 56, 120, top_k=3, blocks=Blocks(1, 1, 1, 2)),
    Case(num_tokens=8, num_experts=5, top_k=2, inner=80, round_weights=True, blocks=Blocks(3, 2, 3, 4)),
    Case(num_experts=64, top_k=6),
]
one_of = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.weight_format}-{case.num_tokens}-{case.inner}")


def draw_logits(rng, case):
    """Few values, so that there are many ties, and both zeros."""
    values = rng.integers(-4, 5, (case.num_tokens, case.num_experts)) / 2
    return np.where(values == 0, rng.choice([0.0, -0.0], values.shape), values).astype(np.float32)


def selected(logits, case):
    """[tokens, top_k] by sorting: equal logits in the order of their experts, +0 before -0."""
    order = np.lexsort((np.broadcast_to(np.arange(logits.shape[1]), logits.shape), np.signbit(logits), -logits), axis=1)
    return order[:, : case.top_k]


def slots_of(chosen, case):
    """The slots' experts: ascending, one token's as selected; -1 for the rest."""
    used = chosen[0] if len(chosen) == 1 else np.unique(chosen)
    return np.concatenate([used, np.full(case.num_slots - len(used), -1)]).astype(np.int32)


def poisoned(matrix: Matrix, chosen) -> Matrix:
    """A stack with NaN where no token selected the expert."""
    unused = np.setdiff1d(np.arange(len(matrix.weight)), chosen)
    if matrix.scales is None:
        return Matrix(matrix.weight.at[unused].set(jnp.nan))
    return Matrix(matrix.weight, matrix.scales.at[unused].set(0x7F), matrix.global_scale.at[unused].set(jnp.nan))


def draw_gate_up(case, seed=0, logits=None):
    rng = np.random.default_rng(seed)
    logits = draw_logits(rng, case) if logits is None else logits
    chosen = selected(logits, case)
    stack = (case.num_experts, case.inner, case.hidden)
    experts = tuple(poisoned(draw_matrix(rng, stack, case.weight_format), chosen) for _ in range(2))
    shared = tuple(draw_matrix(rng, (case.shared_inner, case.hidden), case.weight_format) for _ in range(2))
    return draw(rng, (case.num_tokens, case.hidden), 0.2), jnp.asarray(logits), experts, shared


def draw_down(case, seed=0, logits=None):
    """As `gate_up` would leave it."""
    rng = np.random.default_rng(seed)
    logits = draw_logits(rng, case) if logits is None else logits
    chosen = selected(logits, case)
    ids = slots_of(chosen, case)
    has = (ids[:, None, None] == chosen).any(axis=2)  # [slots, tokens]
    weights = np.where(has, rng.uniform(0.1, 1, has.shape), 0).astype(np.float32)
    activations = np.array(draw(rng, (case.num_slots, case.num_tokens, case.inner)))
    activations[ids < 0] = np.nan
    return (
        jnp.asarray(activations),
        draw(rng, (case.num_tokens, case.shared_inner)),
        jnp.asarray(ids),
        jnp.asarray([(ids >= 0).sum()], jnp.int32),
        jnp.asarray(weights),
        new_counters(case.hidden),
        poisoned(draw_matrix(rng, (case.num_experts, case.hidden, case.inner), case.weight_format), chosen),
        draw_matrix(rng, (case.hidden, case.shared_inner), case.weight_format),
    )


@functools.partial(jax.jit, static_argnames=("case", "implementation"))
def run_gate_up(*args, case, implementation="triton"):
    how = dict(blocks=case.blocks, implementation=implementation, interpret=INTERPRET)
    return gate_up(*args, **case.routing(), **how)


@functools.partial(jax.jit, static_argnames=("case", "implementation"))
def run_down(*args, case, implementation="triton"):
    how = dict(blocks=case.blocks, implementation=implementation, interpret=INTERPRET)
    return down(*args, top_k=case.top_k, **how)


def check_gate_up(case, args):
    """Against the reference; the selection by sorting too."""
    (out, shared, ids, count, weights), want = (
        run_gate_up(*args, case=case, implementation=name) for name in ("triton", "reference")
    )
    logits = np.asarray(args[1])
    chosen = selected(logits, case)
    expected = slots_of(chosen, case)
    used = int((expected >= 0).sum())
    for got_ids, got_count in [(ids, count), (want[2], want[3])]:
        np.testing.assert_array_equal(got_ids, expected)
        np.testing.assert_array_equal(got_count, [used])
    assert_close(*(jnp.where((want[4] > 0)[..., None], x, 0) for x in (out, want[0])))
    assert_close(shared, want[1], steps=3)  # gate, up and their product are rounded each
    scores = 1 / (1 + np.exp(-np.take_along_axis(logits, chosen, axis=1).astype(np.float64)))
    scores = scores / scores.sum(axis=1, keepdims=True) if case.normalise else scores
    by_slot = np.where(expected[:, None, None] == chosen, scores, 0).sum(axis=2)
    for got in (weights, want[4]):
        np.testing.assert_allclose(got, by_slot, rtol=2**-8 if case.round_weights else 1e-6)
        assert not case.round_weights or (np.asarray(got).astype(ml_dtypes.bfloat16) == got).all()
    return out, ids, weights


@one_of
def test_gate_up_is_the_reference(case):
    args = draw_gate_up(case)
    out, _, weights = check_gate_up(case, args)
    if INTERPRET:  # what was never written is NaN
        assert np.isnan(np.asarray(out, np.float32)[np.asarray(weights) == 0]).all()


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=["one", "five"])
@pytest.mark.parametrize("value", [0.0, 1.25], ids=["zeros", "equal"])
def test_of_equal_logits_the_first_experts_are_selected(case, value):
    """+0 ranks above -0 (spec 4.8). All tokens share them: as many slots with an expert as a token selects."""
    logits = np.full((case.num_tokens, case.num_experts), value, np.float32)
    if not value:
        logits[:, ::2] = -0.0
    _, ids, _ = check_gate_up(case, draw_gate_up(case, logits=logits))
    first, step = (0, 1) if value else (1, 2)
    assert np.asarray(ids)[: case.top_k].tolist() == list(range(first, first + step * case.top_k, step))


def test_idle_rows_select_no_expert():
    """What only they would have selected is poisoned, and must not be read."""
    case = CASES[3]
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((case.num_tokens, case.num_experts)).astype(np.float32)
    valid = np.array([True, False, True, False, False])
    chosen = selected(logits, case)
    x, _, experts, shared = draw_gate_up(case, logits=logits)
    busy = np.unique(chosen[valid])
    experts = tuple(poisoned(matrix, busy) for matrix in experts)

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, valid):
        how = dict(blocks=case.blocks, implementation=implementation, interpret=INTERPRET)
        return gate_up(x, jnp.asarray(logits), experts, shared, **case.routing(), valid=valid, **how)

    got, want = (run(name, jnp.asarray(valid)) for name in ("triton", "reference"))
    for one in (got, want):
        assert np.asarray(one[2]).tolist() == busy.tolist() + [-1] * (case.num_slots - len(busy))
        assert np.asarray(one[3]).tolist() == [len(busy)]
        assert not np.asarray(one[4])[:, ~valid].any()
    np.testing.assert_allclose(got[4], want[4], rtol=1e-6)
    assert_close(*(jnp.where((want[4] > 0)[..., None], x, 0) for x in (got[0], want[0])))


def test_tokens_select_the_last_experts_too():
    """Chunks of 32 experts, of which the last is not full; the first is not used at all."""
    case = CASES[3]
    logits = np.random.default_rng(0).standard_normal((case.num_tokens, case.num_experts)).astype(np.float32)
    logits[:, 31:] += 8
    _, ids, _ = check_gate_up(case, draw_gate_up(case, logits=logits))
    assert np.asarray(ids)[0] >= 31 and 36 in np.asarray(ids)


def check_down(case, args):
    (got, counters), (want, _) = (run_down(*args, case=case, implementation=name) for name in ("triton", "reference"))
    assert not np.asarray(counters).any()
    # Both operands of the last sum are rounded.
    routed, _ = run_down(*args[:1], jnp.zeros_like(args[1]), *args[2:], case=case, implementation="reference")
    assert_close(got, want, steps=2, magnitude=np.maximum(abs(routed), abs(want - routed)).astype(np.float64))
    return got


@one_of
def test_down_is_the_reference(case):
    check_down(case, draw_down(case))


def test_down_of_tokens_that_select_the_same():
    """Few slots have an expert: the loop over slots ends early."""
    case = dataclasses.replace(CASES[3], blocks=Blocks(down_warps=2, down_row_groups=1))
    logits = np.tile(np.random.default_rng(1).standard_normal(case.num_experts).astype(np.float32), (5, 1))
    args = draw_down(case, logits=logits)
    assert args[3].item() == case.top_k and args[0].shape[0] == 15
    check_down(case, args)


def test_an_expert_is_no_matter_to_tokens_that_did_not_select_it():
    """Its outputs for them may be infinite or NaN."""
    case = CASES[3]
    args = list(draw_down(case))
    unselected = np.asarray(args[4]) == 0
    assert unselected.any()
    args[0] = jnp.where(unselected[..., None], jnp.asarray(jnp.inf, jnp.bfloat16), args[0])
    check_down(case, args)


def test_of_no_weight_the_shared_expert_is_left():
    case = CASES[0]
    args = list(draw_down(case))
    args[4] = jnp.zeros_like(args[4])
    assert_close(run_down(*args, case=case)[0], accumulate(args[1], args[-1]).astype(jnp.bfloat16))


def like_block(shape, weight_format, num_tokens):
    """The arguments of `gate_up` and of `down`, abstract."""
    num_slots = min(num_tokens * shape.top_k, shape.num_experts)

    def stack(rows, columns):
        return like_matrix((shape.num_experts, rows, columns), weight_format)

    first = (
        like((num_tokens, shape.hidden)),
        like((num_tokens, shape.num_experts), jnp.float32),
        (stack(shape.inner, shape.hidden),) * 2,
        (like_matrix((shape.shared_inner, shape.hidden), weight_format),) * 2,
    )
    second = (
        like((num_slots, num_tokens, shape.inner)),
        like((num_tokens, shape.shared_inner)),
        like((num_slots,), jnp.int32),
        like((1,), jnp.int32),
        like((num_slots, num_tokens), jnp.float32),
        like((pl.cdiv(shape.hidden, ROW_GROUP),), jnp.int32),
        stack(shape.hidden, shape.inner),
        like_matrix((shape.hidden, shape.shared_inner), weight_format),
    )
    return first, second


@pytest.mark.parametrize(
    "target, shape, weight_format, num_tokens",
    [
        ("h200", FLINT, "nvfp4", 1),
        ("h200", FLINT, "nvfp4", 2),
        ("h200", FLINT, "nvfp4", 8),
        ("h200", FLINT, "bf16", 1),
        ("h200", FLINT, "bf16", 8),
        ("h200", FLINT_TINY, "nvfp4", 3),
        ("gb200", FLINT, "nvfp4", 8),
    ],
    ids=lambda value: f"{value.hidden}" if dataclasses.is_dataclass(value) else None,
)
def test_two_or_three_kernels_at_the_models_shapes(target, shape, weight_format, num_tokens, compiled):
    first, second = like_block(shape, weight_format, num_tokens)
    options = dict(top_k=shape.top_k, normalise=True, round_weights=False)

    def fn(first, counters, down_matrix, shared_down):
        return down(*gate_up(*first, **options), counters, down_matrix, shared_down, top_k=shape.top_k)

    report = with_layouts(compiled, target, fn, first, *second[-3:], donate=(1,))
    select = {} if num_tokens == 1 else {"moe_select": 1}
    assert_well_compiled(
        report, {"moe_gate_up": 1, "moe_down": 1, **select}, without_matrices=["moe_select"], wide=shape is FLINT
    )
