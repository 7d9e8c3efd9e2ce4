"""Random layers and caches for decode attention. All that a token must not read is NaN."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_attention import Schedule, new_counters

PAGE = 64


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is fixed when compiling."""

    kv_heads: int = 2
    group: int = 8
    head_dim: int = 128
    entries: int = 6
    window: int | None = None
    rotary: bool = False
    schedule: Schedule | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def static(self) -> dict:
        return {"window": self.window, "eps": 1e-6, "schedule": self.schedule}


def draw(layer: Layer, positions, seed=0, dtype=jnp.float32, valid=None, missing=0.0, spare=2):
    """Arguments of `decode_attention`: a row a position, pages shuffled over a pool with `spare` pages too many.

    Args:
        valid: which rows are; None means all.
        missing: how much of each table names no page, in the three ways there are.
    """
    rng = np.random.default_rng(seed)
    batch, d = len(positions), layer.head_dim
    positions = np.asarray(positions, np.int32)
    valid = np.ones(batch, bool) if valid is None else np.asarray(valid)
    num_pages = batch * layer.entries + spare
    table = rng.permutation(num_pages)[: batch * layer.entries].reshape(batch, layer.entries).astype(np.int32)
    nowhere = rng.choice([-1, num_pages, 2**31 - 1], table.shape)
    table = np.where(rng.random(table.shape) < missing, nowhere, table).astype(np.int32)
    pools = []
    for _ in range(2):
        pool = np.full((num_pages, layer.kv_heads, PAGE, d), np.nan, np.float32)
        for row in np.flatnonzero(valid):
            first = 0 if layer.window is None else max(0, positions[row] - layer.window + 1)
            for key in range(first, positions[row]):
                place = table[row, key // PAGE % layer.entries]
                if 0 <= place < num_pages:
                    pool[place, :, key % PAGE] = rng.standard_normal((layer.kv_heads, d))
        pools.append(jnp.asarray(pool, dtype))
    qkv = rng.standard_normal((batch, (layer.heads + 2 * layer.kv_heads) * d)).astype(np.float32)
    qkv[~valid.astype(bool)] = np.nan
    q_norm, k_norm = 1 + 0.3 * rng.standard_normal((2, d)).astype(np.float32)
    angles = rng.uniform(-3, 3, (batch, d // 2)).astype(np.float32)
    return (
        jnp.asarray(qkv, dtype),
        jnp.asarray(q_norm, dtype),
        jnp.asarray(k_norm, dtype),
        (jnp.cos(angles), jnp.sin(angles)) if layer.rotary else None,
        jnp.asarray(2 * rng.standard_normal(layer.heads), jnp.float32),
        *pools,
        jnp.asarray(table),
        jnp.asarray(positions),
        jnp.asarray(valid),
        new_counters(batch, layer.kv_heads),
    )


def assert_close(got, want, dtype):
    """Results of two implementations. What was NaN in a pool must still be, and counters are zero again.

    In float32 sums run in another order. In bfloat16 a probability is rounded relative to another maximum (2**-8 of
    it, both ways), and an element of a query or key may be rounded the other way: one step of the largest output.
    """
    *got, counters = got
    np.testing.assert_array_equal(counters, 0)
    for name, a, b in zip(("out", "k_pool", "v_pool"), got, want[:3], strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        if dtype == jnp.float32:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=name)
        elif name == "v_pool":
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            np.testing.assert_allclose(
                a, b, rtol=2**-7, atol=2**-7 * np.abs(b[np.isfinite(b)]).max(initial=0), err_msg=name
            )
