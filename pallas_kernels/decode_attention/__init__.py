"""Attention of one new token a row against a paged cache: Flint's decode step between its qkv and o projections.

Per query head: RMSNorm, RoPE where the layer has it, softmax over the visible keys and one sink logit. Per kv head:
RMSNorm and RoPE of the key, and the new key and value go to their page.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention import reference
from pallas_kernels.decode_attention.schedule import COUNTERS, PAGE_SIZE, Schedule, default_schedule
from pallas_kernels.decode_attention.triton import attention

__all__ = ["Schedule", "decode_attention", "default_schedule", "new_counters", "supports"]

HEAD_DIMS = (32, 64, 128)
GROUPS = (1, 2, 4, 8)


def supports(num_heads: int, num_kv_heads: int, head_dim: int, page_size: int = PAGE_SIZE) -> bool:
    """Whether the Triton kernel takes these sizes; where they do not, `decode_attention` raises ValueError."""
    whole = num_kv_heads > 0 and num_heads % num_kv_heads == 0
    return whole and num_heads // num_kv_heads in GROUPS and head_dim in HEAD_DIMS and page_size == PAGE_SIZE


def new_counters(batch: int, num_kv_heads: int) -> jax.Array:
    """What the kernel's programs find out by which of them is the last: int32 zeros."""
    return jnp.zeros((batch, num_kv_heads, COUNTERS), jnp.int32)


def decode_attention(
    qkv: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    rope: tuple[jax.Array, jax.Array] | None,
    sinks: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    counters: jax.Array,
    *,
    window: int | None,
    eps: float,
    num_splits: int | None = None,
    schedule: Schedule | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Writes each row's new token to its page and attends to it and what precedes it.

    Rounding, to qkv's dtype: normalised heads; rotated heads; probabilities, relative to a running maximum, in the
    product with the values (their sum is taken before); the output. All else is float32.

    Args:
        qkv: [batch, (num_heads + 2 * num_kv_heads) * head_dim] bfloat16, the projections of the new tokens: the query
            heads, then the key heads, then the value heads.
        q_norm, k_norm: [head_dim] bfloat16.
        rope: cos and sin of each row's position, [batch, head_dim / 2] float32 each; None for a layer without RoPE.
        sinks: [num_heads] float32, finite; one more logit a head, not scaled and without a value.
        k_pool, v_pool: [num_pages, num_kv_heads, 64, head_dim] in qkv's dtype. Updated in place: donate them.
        table: [batch, entries] int32; logical page p of a row is at entry `p % entries`. A place outside
            [0, num_pages) means no page: it is not written, and its keys are not seen. In a sliding layer the pages of
            a window must have entries of their own.
        positions: [batch] int32, at most 64 * entries - 1 in a layer without window. The new token sees positions
            max(0, position - window + 1) to position, itself included.
        valid: [batch] bool or int32; an invalid row writes nothing, reads nothing and gives 0.
        counters: of `new_counters`; zeros again afterwards, so that one array serves layer after layer. Updated in
            place, as the pools.
        window: keys a token sees, itself included; None sees all.
        eps: of the norms.
        num_splits: programs that share a row's keys; None takes that of `default_schedule`.
        schedule: block sizes, in place of the default ones.
        implementation: "triton", or "reference", which is jnp and takes any sizes.
        interpret: runs the Triton kernel on any backend, slowly; float32 is allowed here.

    Returns:
        [batch, num_heads * head_dim] in qkv's dtype; both pools; the counters.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or that the kernel does not take (see `supports`).
    """
    inputs = (qkv, q_norm, k_norm, rope, sinks, k_pool, v_pool, table, positions, valid)
    _check(*inputs, counters, window)
    if implementation == "reference":
        return *reference.decode_attention(*inputs, window=window, eps=eps), counters
    if implementation != "triton":
        raise ValueError(f"implementation is 'triton' or 'reference', not {implementation!r}")
    (batch, width), (_, kv_heads, page_size, head_dim) = qkv.shape, k_pool.shape
    heads = width // head_dim - 2 * kv_heads
    if not supports(heads, kv_heads, head_dim, page_size):
        raise ValueError(
            f"the kernel takes head_dim {HEAD_DIMS}, {GROUPS} heads a kv head and pages of {PAGE_SIZE}; not "
            f"{heads} heads of {head_dim} on {kv_heads} kv heads, pages of {page_size}"
        )
    if qkv.dtype != jnp.bfloat16 and not (interpret and qkv.dtype == jnp.float32):
        raise ValueError(f"the kernel takes bfloat16, not {qkv.dtype}")
    schedule = schedule or default_schedule(batch, kv_heads, table.shape[1], window, num_splits)
    static = {"window": window, "eps": eps, "schedule": schedule, "interpret": interpret}
    out, k_pool, v_pool, counters, _ = attention(*inputs, counters, **static)
    return out, k_pool, v_pool, counters


def _check(qkv, q_norm, k_norm, rope, sinks, k_pool, v_pool, table, positions, valid, counters, window):
    batch, width = qkv.shape
    _, kv_heads, _, head_dim = k_pool.shape
    heads = width // head_dim - 2 * kv_heads
    per_row = (batch,)
    shapes = {
        "qkv": (qkv, (batch, (heads + 2 * kv_heads) * head_dim)),
        "q_norm": (q_norm, (head_dim,)),
        "k_norm": (k_norm, (head_dim,)),
        "sinks": (sinks, (heads,)),
        "v_pool": (v_pool, k_pool.shape),
        "table": (table, (batch, *table.shape[1:2])),
        "positions": (positions, per_row),
        "valid": (valid, per_row),
        "counters": (counters, (batch, kv_heads, COUNTERS)),
    }
    for name, x in zip(("cos", "sin"), rope or (), strict=False):
        shapes[name] = (x, (batch, head_dim // 2))
    for name, (x, shape) in shapes.items():
        if x.shape != shape:
            raise ValueError(f"{name} is {x.shape}; {shape} goes with qkv {qkv.shape} and k_pool {k_pool.shape}")
    if heads < 1 or heads % kv_heads:
        raise ValueError(f"qkv {qkv.shape} holds {heads} query heads for {kv_heads} kv heads of {head_dim}")
    if not qkv.dtype == k_pool.dtype == v_pool.dtype:
        raise ValueError(f"qkv {qkv.dtype} and pools {k_pool.dtype}, {v_pool.dtype} differ")
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} does not hold the token itself")
