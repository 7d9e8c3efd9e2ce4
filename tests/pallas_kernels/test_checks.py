"""Arguments that do not fit together are refused by name, before a kernel reads past one of them."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dense_gemv import dense_gemv
from pallas_kernels.moe import down, gate_up
from pallas_kernels.router import router
from tests.pallas_kernels.matrix_cases import like, like_matrix

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 2, 64, 32, 5, 2
GEMV = dict(
    x=like((TOKENS, HIDDEN)),
    matrices=[like_matrix((24, HIDDEN), "nvfp4")] * 2,
    residual=like((TOKENS, HIDDEN)),
    norm_weight=like((HIDDEN,)),
)
ROUTER = dict(
    x=like((TOKENS, HIDDEN)),
    residual=like((TOKENS, HIDDEN)),
    norm_weight=like((HIDDEN,)),
    gate=like((EXPERTS, HIDDEN), jnp.float32),
)
GATE_UP = dict(
    x=like((TOKENS, HIDDEN)),
    logits=like((TOKENS, EXPERTS), jnp.float32),
    experts=(like_matrix((EXPERTS, INNER, HIDDEN), "bf16"),) * 2,
    shared=(like_matrix((INNER, HIDDEN), "bf16"),) * 2,
    valid=like((TOKENS,), jnp.bool_),
)
SLOTS = TOKENS * TOP_K
DOWN = dict(
    activations=like((SLOTS, TOKENS, INNER)),
    shared_activations=like((TOKENS, INNER)),
    ids=like((SLOTS,), jnp.int32),
    count=like((1,), jnp.int32),
    weights=like((SLOTS, TOKENS), jnp.float32),
    counters=like((HIDDEN // 8,), jnp.int32),
    experts=like_matrix((EXPERTS, HIDDEN, INNER), "bf16"),
    shared=like_matrix((HIDDEN, INNER), "bf16"),
)


def traced(op, arguments, **static):
    """Traces an op without running it."""
    return jax.eval_shape(lambda arguments: op(**arguments, **static), arguments)


OPS = {
    "dense_gemv": (dense_gemv, GEMV, {}),
    "router": (router, ROUTER, dict(norm_eps=1e-6, round_logits=False)),
    "gate_up": (gate_up, GATE_UP, dict(top_k=TOP_K, normalise=True, round_weights=False)),
    "down": (down, DOWN, dict(top_k=TOP_K)),
}


@pytest.mark.parametrize("name", OPS)
def test_what_fits_is_taken(name):
    op, arguments, static = OPS[name]
    traced(op, arguments, **static, implementation="reference")
    with pytest.raises(ValueError, match="'triton' or 'reference', not 'cuda'"):
        traced(op, arguments, **static, implementation="cuda")


nvfp4 = like_matrix((24, HIDDEN), "nvfp4")
WRONG = [
    ("dense_gemv", dict(x=like((TOKENS, HIDDEN), jnp.float32)), "x is float32, not bfloat16"),
    ("dense_gemv", dict(x=like((TOKENS, 2 * HIDDEN)), residual=None), "norm_weight is .64,.; .128,. goes"),
    ("dense_gemv", dict(residual=like((1, HIDDEN))), "residual is"),
    ("dense_gemv", dict(norm_weight=None), "residual only before a norm"),
    ("dense_gemv", dict(matrices=[]), "at least one matrix"),
    ("dense_gemv", dict(matrices=[nvfp4, like_matrix((24, HIDDEN), "bf16")]), "several formats: bf16, nvfp4"),
    ("dense_gemv", dict(matrices=[nvfp4._replace(scales=like((24, 3), jnp.uint8))]), "matrix 0's scales"),
    ("dense_gemv", dict(matrices=[nvfp4._replace(weight=like((24, 16), jnp.uint8))]), "codes is uint8, not uint16"),
    ("dense_gemv", dict(x=like((9, HIDDEN)), residual=None), "9 tokens .at most 8."),
    ("router", dict(residual=like((1, HIDDEN))), "residual is"),
    ("router", dict(gate=like((EXPERTS, 32), jnp.float32)), "gate is"),
    ("gate_up", dict(x=like((9, HIDDEN))), "9 tokens .at most 8."),
    ("gate_up", dict(logits=like((TOKENS, 16), jnp.float32)), "logits is"),
    ("gate_up", dict(valid=like((1,), jnp.bool_)), "valid is"),
    ("gate_up", dict(shared=(like_matrix((INNER, HIDDEN), "nvfp4"),) * 2), "several formats"),
    ("down", dict(activations=like((SLOTS + 1, TOKENS, INNER))), "2 tokens of top_k 2 have 4 slots, not 5"),
    ("down", dict(counters=like((2,), jnp.int32)), "counters is"),
    ("down", dict(shared=like_matrix((HIDDEN - 8, INNER), "bf16")), "shared is"),
]


@pytest.mark.parametrize("name, changed, message", WRONG, ids=[f"{name}: {message}" for name, _, message in WRONG])
def test_what_does_not_fit_is_refused_by_name(name, changed, message):
    op, arguments, static = OPS[name]
    with pytest.raises(ValueError, match=message):
        traced(op, arguments | changed, **static)


def test_more_experts_than_there_are_cannot_be_selected():
    with pytest.raises(ValueError, match="top_k is 6, and there are 5 experts"):
        traced(gate_up, GATE_UP, **OPS["gate_up"][2] | dict(top_k=6))


def test_swiglu_wants_two_matrices_of_as_many_rows():
    for rows in ([24], [24, 32], [24, 24, 24]):
        matrices = [like_matrix((n, HIDDEN), "bf16") for n in rows]
        with pytest.raises(ValueError, match="two matrices of as many rows"):
            traced(dense_gemv, GEMV | dict(matrices=matrices), activation="swiglu")
    with pytest.raises(ValueError, match="activation is None or 'swiglu', not 'gelu'"):
        traced(dense_gemv, GEMV, activation="gelu")
