"""A stack of routed experts, and three ways to run the selected ones that compute the same thing.

`experts_reference` is the definition: every expert on every token, differentiable, wasteful. `experts_gather` reads
each selected expert's weights once per (token, slot) and suits a decode step. `experts_grouped` sorts the tokens by
expert and suits prefill. Only the order of float32 sums inside a dot differs between them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from modeling.layers.linear import Linear
from modeling.layers.numerics import rounded

# Bounds of the rows of one group in `experts_grouped`: large enough for a matrix unit, not so large that an expert with
# a handful of tokens multiplies mostly padding.
MIN_GROUP_ROWS, MAX_GROUP_ROWS = 16, 64
# Up to this many (token, slot) pairs, gathering whole experts costs less than sorting.
GATHER_PAIRS = 64


class Experts(nnx.Module):
    """A stack of SwiGLU experts; gate and up stay unrounded until the activation (unlike `SwiGLU`).

    Attributes:
        round_output: whether an expert's output is rounded before it is weighted (Flint), or only the weighted sum is
            (Inkling).
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        weight_format: str,
        round_output: bool = True,
    ):
        self.num_experts = num_experts
        self.round_output = round_output
        self.gate_proj = Linear(intermediate_size, hidden_size, weight_format, num_experts)
        self.up_proj = Linear(intermediate_size, hidden_size, weight_format, num_experts)
        self.down_proj = Linear(hidden_size, intermediate_size, weight_format, num_experts)

    def __call__(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """One expert [] on rows [rows, hidden_size]."""
        gate, up = self.gate_proj.accumulate(x, expert), self.up_proj.accumulate(x, expert)
        activation = rounded(jax.nn.silu(gate) * up, x.dtype)
        return self.output(self.down_proj.accumulate(activation, expert), x.dtype)

    def output(self, rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Float32 outputs of the down projection in the precision in which they are weighted."""
        return rounded(rows, dtype) if self.round_output else rows


def run_experts(
    experts: Experts, x: jax.Array, weights: jax.Array, expert_ids: jax.Array, valid: jax.Array | None
) -> jax.Array:
    """The weighted sum of the selected experts, each way where it suits.

    Args:
        x: [tokens, hidden_size]. weights: float32 [tokens, k], multiplied after the down projection.
        expert_ids: int32 [tokens, k].
        valid: [tokens], the tokens that are not padding; what the others get is meaningless. None picks the
            differentiable definition.

    Returns:
        Float32 [tokens, hidden_size], not yet rounded.
    """
    if valid is None:
        return experts_reference(experts, x, weights, expert_ids)
    if expert_ids.size <= GATHER_PAIRS:
        # Idle rows all name one expert, which is read once and stays in the cache.
        return experts_gather(experts, x, weights, jnp.where(valid[:, None], expert_ids, 0))
    # An id past the last expert: no expert runs these.
    return experts_grouped(experts, x, weights, jnp.where(valid[:, None], expert_ids, experts.num_experts))


def _combine(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Weighted float32 sum in selection order: rows [tokens, k, hidden], weights [tokens, k] -> [tokens, hidden]."""
    total = jnp.zeros((rows.shape[0], rows.shape[2]), jnp.float32)
    for slot in range(rows.shape[1]):
        total = total + weights[:, slot, None] * rows[:, slot].astype(jnp.float32)
    return total


def experts_reference(experts: Experts, x: jax.Array, weights: jax.Array, expert_ids: jax.Array) -> jax.Array:
    """Every expert on every token. x [tokens, hidden], weights and ids [tokens, k] -> float32 [tokens, hidden]."""
    everything = lax.map(
        lambda expert: experts(x, expert), jnp.arange(experts.num_experts)
    )  # [experts, tokens, hidden]
    rows = everything[expert_ids, jnp.arange(x.shape[0])[:, None]]
    return _combine(rows, weights)


def experts_gather(experts: Experts, x: jax.Array, weights: jax.Array, expert_ids: jax.Array) -> jax.Array:
    """As `experts_reference`, reading only the selected experts' weights: for few tokens."""

    def accumulate(linear: Linear, rows: jax.Array) -> jax.Array:
        # rows [tokens, k, in]. A multiply and sum lets XLA fuse the gather and the decoding into one kernel, where a
        # dot would first write the decoded matrices out.
        matrix = linear.matrix(jnp.float32, expert_ids)  # [tokens, k, out, in]
        products = rows.astype(jnp.float32)[..., None, :] * matrix
        scale = jnp.asarray(linear.scale(expert_ids), jnp.float32)
        return products.sum(-1) * jnp.broadcast_to(scale, expert_ids.shape)[..., None]

    rows = jnp.broadcast_to(x[:, None], (*expert_ids.shape, x.shape[-1]))
    gate, up = accumulate(experts.gate_proj, rows), accumulate(experts.up_proj, rows)
    activation = rounded(jax.nn.silu(gate) * up, x.dtype)
    return _combine(experts.output(accumulate(experts.down_proj, activation), x.dtype), weights)


def experts_grouped(experts: Experts, x: jax.Array, weights: jax.Array, expert_ids: jax.Array) -> jax.Array:
    """As `experts_reference`, one expert's tokens at a time: for many tokens.

    The (token, slot) pairs are sorted by expert and laid out in groups of rows that never span two experts, the last
    group of an expert padded. A loop runs over the groups that exist (a number known only on the device), decoding one
    expert's weights at a time, so that packed weights are never expanded as a whole, and writes each group's rows where
    they lie together: a scatter in the loop costs six times as much on an H200. Pairs whose id is past the last expert
    are left out.
    """
    num_tokens, k = expert_ids.shape
    num_pairs, num_experts = num_tokens * k, experts.num_experts
    group_rows = min(MAX_GROUP_ROWS, max(MIN_GROUP_ROWS, 1 << (num_pairs // num_experts).bit_length()))
    max_groups = num_pairs // group_rows + min(num_experts, num_pairs)

    order = jnp.argsort(expert_ids.reshape(-1), stable=True)  # pair at each sorted place
    sorted_ids = expert_ids.reshape(-1)[order]
    counts = jnp.bincount(expert_ids.reshape(-1), length=num_experts)
    pair_starts = jnp.cumsum(counts) - counts  # [experts], in sorted places
    groups = (counts + group_rows - 1) // group_rows
    group_ends = jnp.cumsum(groups)  # [experts]
    # Row of each sorted pair in the padded layout; pairs of no expert go past its end and are dropped.
    first_rows = (group_ends - groups) * group_rows
    rows = first_rows[sorted_ids] + jnp.arange(num_pairs) - pair_starts[sorted_ids]
    rows = jnp.where(sorted_ids < num_experts, rows, max_groups * group_rows).astype(jnp.int32)
    token_of_row = jnp.zeros(max_groups * group_rows, jnp.int32).at[rows].set(order // k, mode="drop")
    row_of_pair = jnp.zeros(num_pairs, jnp.int32).at[order].set(rows)
    # For all groups at once: a search inside the loop is a loop of its own, of nine dependent steps a group on a GPU.
    expert_of_group = jnp.searchsorted(group_ends, jnp.arange(max_groups), side="right", method="compare_all")

    def run_group(group: jax.Array, out: jax.Array) -> jax.Array:
        tokens = lax.dynamic_slice(token_of_row, (group * group_rows,), (group_rows,))
        return lax.dynamic_update_slice(out, experts(x[tokens], expert_of_group[group]), (group * group_rows, 0))

    out = jnp.zeros((max_groups * group_rows, x.shape[-1]), x.dtype if experts.round_output else jnp.float32)
    out = lax.fori_loop(0, group_ends[-1], run_group, out)
    return _combine(out[row_of_pair].reshape(num_tokens, k, -1), weights)
