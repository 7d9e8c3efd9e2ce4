"""An MoE block of a decode step: the selected experts and the shared expert, for up to eight tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_arrays, check_implementation, check_matrices
from pallas_kernels.dense_gemv import supports
from pallas_kernels.moe import reference, triton
from pallas_kernels.moe.blocks import Blocks
from pallas_kernels.moe.down import down as _down
from pallas_kernels.tuning import block_sizes, case_of
from pallas_kernels.warp_tiles import ROW_GROUP, Matrix

__all__ = ["Blocks", "Matrix", "default_blocks", "down", "gate_up", "new_counters"]


def gate_up(
    x: jax.Array,
    logits: jax.Array,
    experts: tuple[Matrix, Matrix],
    shared: tuple[Matrix, Matrix],
    *,
    top_k: int,
    normalise: bool,
    round_weights: bool,
    valid: jax.Array | None = None,
    blocks: Blocks | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> list[jax.Array]:
    """Selects experts and runs their first halves, and the shared expert's.

    Args:
        x: bfloat16 [tokens, hidden]. logits: float32 [tokens, num_experts].
        experts: gate and up, stacks [num_experts, inner, hidden]. shared: gate and up [shared_inner, hidden].
        top_k: experts a token. normalise: whether its weights are divided by their sum.
        round_weights: whether they are rounded to bfloat16 (spec 4.8).
        valid: bool [tokens]; the others select no expert, so that none is read for them. One token selects in any case.

    Returns:
        By slot, a slot being one of the step's distinct experts: silu(gate) * up, rounded once (spec 4.9), bfloat16
        [slots, tokens, inner]; the shared expert's, with gate and up rounded too (4.10), [tokens, shared_inner]; the
        slots' experts int32 [slots], -1 for none; their number [1]; each token's weight of each slot, float32 [slots,
        tokens], 0 where it did not select it. Slots are in ascending order of their experts, with one token in
        descending order of their logits. A slot's activations are written for the tokens that selected its expert.

    Raises:
        ValueError: arguments that do not fit together, or what `dense_gemv.supports` refuses.
    """
    check_implementation(implementation)
    _check_gate_up(x, logits, experts, shared, top_k, valid)
    options = dict(top_k=top_k, normalise=normalise, round_weights=round_weights, valid=valid)
    if implementation == "reference":
        return reference.gate_up(x, logits, experts, shared, **options)
    blocks = blocks or default_blocks("moe_gate_up", x.shape[0], experts[0], shared[0])
    return list(triton.gate_up(x, logits, experts, shared, blocks=blocks, interpret=interpret, **options))


def down(
    activations: jax.Array,
    shared_activations: jax.Array,
    ids: jax.Array,
    count: jax.Array,
    weights: jax.Array,
    counters: jax.Array,
    experts: Matrix,
    shared: Matrix,
    *,
    top_k: int,
    blocks: Blocks | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The second halves: each expert's output is rounded, weighted, and summed in float32; the sum is rounded and added
    to the shared expert's output (spec 4.9 to 4.11).

    Args: what `gate_up` returned; counters, those of `new_counters` or what the last launch gave back; the down
        projections [num_experts, hidden, inner], [hidden, shared_inner].

    Returns:
        bfloat16 [tokens, hidden]; the counters, to be passed on.

    Raises:
        ValueError: arguments that do not fit together, or what `dense_gemv.supports` refuses.
    """
    check_implementation(implementation)
    _check_down(activations, shared_activations, ids, count, weights, counters, experts, shared, top_k)
    if implementation == "reference":
        return reference.down(activations, shared_activations, ids, count, weights, experts, shared), counters
    blocks = blocks or default_blocks("moe_down", activations.shape[1], experts, shared)
    arguments = (activations, shared_activations, ids, count, weights, counters, experts, shared)
    return _down(*arguments, top_k=top_k, blocks=blocks, interpret=interpret)


def new_counters(hidden: int) -> jax.Array:
    """What `down` counts with: zeros, and zeros again after each launch."""
    return jnp.zeros(-(-hidden // ROW_GROUP), jnp.int32)


def _check_gate_up(x, logits, experts, shared, top_k, valid) -> None:
    (tokens, hidden), (num_experts, inner) = x.shape, experts[0].weight.shape[:2]
    _check_size(tokens, hidden, experts[0])
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}, and there are {num_experts} experts")
    check_arrays(
        x=(x, (tokens, hidden), (jnp.bfloat16,)),
        logits=(logits, (tokens, num_experts), (jnp.float32,)),
        valid=(valid, (tokens,), (jnp.bool_,)),
    )
    stack, alone = (num_experts, inner, hidden), (shared[0].weight.shape[0], hidden)
    named = dict(zip(("gate", "up", "the shared gate", "the shared up"), (*experts, *shared), strict=True))
    check_matrices(**{name: (matrix, alone if "shared" in name else stack) for name, matrix in named.items()})


def _check_down(activations, shared_activations, ids, count, weights, counters, experts, shared, top_k) -> None:
    (slots, tokens, inner), (num_experts, hidden) = activations.shape, experts.weight.shape[:2]
    shared_inner = shared_activations.shape[-1]
    for columns in (inner, shared_inner):
        _check_size(tokens, columns, experts)
    if slots != min(tokens * top_k, num_experts):
        raise ValueError(f"{tokens} tokens of top_k {top_k} have {min(tokens * top_k, num_experts)} slots, not {slots}")
    check_arrays(
        activations=(activations, (slots, tokens, inner), (jnp.bfloat16,)),
        shared_activations=(shared_activations, (tokens, shared_inner), (jnp.bfloat16,)),
        ids=(ids, (slots,), (jnp.int32,)),
        count=(count, (1,), (jnp.int32,)),
        weights=(weights, (slots, tokens), (jnp.float32,)),
        counters=(counters, (-(-hidden // ROW_GROUP),), (jnp.int32,)),
    )
    check_matrices(experts=(experts, (num_experts, hidden, inner)), shared=(shared, (hidden, shared_inner)))


def _check_size(tokens: int, columns: int, matrix: Matrix) -> None:
    if problem := supports(tokens, columns, [matrix]):
        raise ValueError(f"the MoE kernels do not take {problem}")


def default_blocks(op: str, num_tokens: int, experts: Matrix, shared: Matrix) -> Blocks:
    """Those of the device's table, or else a rule that did well on an H200."""
    if sizes := block_sizes(op, case_of((experts, shared), num_tokens)):
        return Blocks(**sizes)
    return Blocks() if num_tokens == 1 else Blocks(down_row_groups=4)
