"""An MoE block of a decode step: the selected experts and the shared expert, for up to eight tokens."""

from __future__ import annotations

import jax

from pallas_kernels.moe import block, reference, triton
from pallas_kernels.moe.block import Experts, num_programs
from pallas_kernels.moe.triton import Blocks
from pallas_kernels.warp_tiles import Matrix

__all__ = ["Blocks", "Experts", "Matrix", "down", "gate_up", "moe_block", "num_programs"]


def gate_up(
    x: jax.Array,
    logits: jax.Array,
    experts: tuple[Matrix, Matrix],
    shared: tuple[Matrix, Matrix],
    *,
    top_k: int,
    normalise: bool,
    round_weights: bool,
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

    Returns:
        By slot, a slot being one of the step's distinct experts in ascending order: silu(gate) * up, rounded once (spec
        4.9), bfloat16 [slots, tokens, inner]; the shared expert's, with gate and up rounded too (4.10), [tokens,
        shared_inner]; the slots' experts int32 [slots], -1 for none; their number [1]; each token's weight of each slot,
        float32 [slots, tokens], 0 where it did not select it. Activations of slots without an expert are not written.
    """
    options = dict(top_k=top_k, normalise=normalise, round_weights=round_weights)
    if implementation == "reference":
        return reference.gate_up(x, logits, experts, shared, **options)
    options |= dict(blocks=blocks or Blocks(), interpret=interpret)
    return list(triton.gate_up(x, logits, experts, shared, **options))


def down(
    activations: jax.Array,
    shared_activations: jax.Array,
    ids: jax.Array,
    count: jax.Array,
    weights: jax.Array,
    experts: Matrix,
    shared: Matrix,
    *,
    blocks: Blocks | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> jax.Array:
    """The second halves: each expert's output is rounded, weighted, and summed in float32; the sum is rounded and added
    to the shared expert's output (spec 4.9 to 4.11).

    Args: what `gate_up` returned, and the down projections [num_experts, hidden, inner], [hidden, shared_inner].

    Returns:
        bfloat16 [tokens, hidden].
    """
    arguments = (activations, shared_activations, ids, count, weights, experts, shared)
    if implementation == "reference":
        return reference.down(*arguments)
    return triton.down(*arguments, blocks=blocks or Blocks(), interpret=interpret)


def moe_block(
    x: jax.Array,
    residual: jax.Array,
    norm_weight: jax.Array,
    gate: jax.Array,
    experts: Experts,
    shared: Experts,
    counter: jax.Array,
    *,
    top_k: int,
    normalise: bool,
    round_router: bool,
    norm_eps: float,
    num_warps: int | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Everything from the residual add before the block to its output, for one token: `router`, `gate_up` and `down` in
    one launch.

    Args:
        x, residual: bfloat16 [1, hidden]. norm_weight: bfloat16 [hidden]. gate: [num_experts, hidden].
        experts, shared: gate, up and down matrices.
        counter: int32 [1], a multiple of the number of programs: zero before the first launch, then what the one before
            returned. Updated in place.
        round_router: whether logits and weights are rounded to bfloat16.

    Returns:
        The output and the new stream, bfloat16 [1, hidden], and the counter.
    """
    options = dict(top_k=top_k, normalise=normalise, round_router=round_router, norm_eps=norm_eps)
    if implementation == "reference":
        return reference.moe_block(x, residual, norm_weight, gate, experts, shared, counter, **options)
    default = 16 if experts.gate.scales is None else 8  # registers hold all of a program's weights
    options |= dict(num_warps=num_warps or default, interpret=interpret)
    return block.moe_block(x, residual, norm_weight, gate, experts, shared, counter, **options)
