"""An MoE block of a decode step: the selected experts and the shared expert, for up to eight tokens."""

from __future__ import annotations

import jax

from pallas_kernels.moe import reference, triton
from pallas_kernels.moe.triton import Blocks
from pallas_kernels.tuning import block_sizes, case_of
from pallas_kernels.warp_tiles import Matrix

__all__ = ["Blocks", "Matrix", "default_blocks", "down", "gate_up"]


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
        descending order of their logits. Activations of slots without an expert are not written.
    """
    options = dict(top_k=top_k, normalise=normalise, round_weights=round_weights, valid=valid)
    if implementation == "reference":
        return reference.gate_up(x, logits, experts, shared, **options)
    blocks = blocks or default_blocks("moe_gate_up", x.shape[0], experts[0], shared[0])
    options |= dict(blocks=blocks, interpret=interpret)
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
    blocks = blocks or default_blocks("moe_down", activations.shape[1], experts, shared)
    return triton.down(*arguments, blocks=blocks, interpret=interpret)


def default_blocks(op: str, num_tokens: int, experts: Matrix, shared: Matrix) -> Blocks:
    """Those of the device's table; else one token's experts all asked for at once, several tokens' a few at a time."""
    if sizes := block_sizes(op, case_of((experts, shared), num_tokens)):
        return Blocks(**sizes)
    if experts.scales is None:
        return Blocks(down_warps=16, down_passes=6 if num_tokens == 1 else 2)
    return Blocks(down_passes=3 if num_tokens == 1 else 2)
