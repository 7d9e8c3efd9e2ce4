"""Inline PTX: how a kernel has it run, and the pieces of text that warp tiles are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

# A barrier whose threads learn whether any of them brought a true predicate.
BARRIER = "bar.red.or.pred"
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def place_codes(register: str, scratch: str, word: str, nibble: int) -> str:
    """PTX: the given nibble of both 16-bit halves of a word, in the places of bfloat16: bits 8..6 take exponent and
    mantissa, bit 15 the sign."""
    exponent = ("shl.b32", 6), ("shl.b32", 2), ("shr.b32", 2), ("shr.b32", 6)
    sign = ("shl.b32", 12), ("shl.b32", 8), ("shl.b32", 4), ("shl.b32", 0)
    (up, by), (to_sign, far) = exponent[nibble], sign[nibble]
    return (
        f"{up} {register}, {word}, {by}; {to_sign} {scratch}, {word}, {far};"
        f" and.b32 {register}, {register}, 0x01C001C0; lop3.b32 {register}, {scratch}, 0x80008000, {register}, 0xEA;"
    )


def mma_of_codes() -> str:
    """PTX: a tile of codes times one token's activations, a block scale for each half of a lane's words and array."""
    # Operands: 0..7 the sum, 8..11 and 12..15 codes, 16..31 activations by nibble, 32..39 and 40..47 scales, 48
    # zero. Of the sums over both halves of a line, the odd lanes g want the second.
    zero = "".join(f"mov.f32 c{s}{i}, $48;" for s in range(2) for i in range(4))
    products = "".join(
        "".join(
            place_codes(f"a{2 * word + half}", "t", f"${8 + 4 * half + 2 * s + word}", nibble)
            for word in range(2)
            for half in range(2)
        )
        + f"{MMA} {{c{s}0, c{s}1, c{s}2, c{s}3}}, {{a0, a1, a2, a3}},"
        f" {{{registers(16 + 4 * nibble + 2 * s, 2)}}}, {{c{s}0, c{s}1, c{s}2, c{s}3}};"
        for nibble in range(4)
        for s in range(2)
    )
    odd = "mov.u32 t, %laneid; and.b32 t, t, 4; setp.ne.u32 p, t, 0;"
    add = "".join(
        f"selp.f32 c{s}0, c{s}{2 * u + 1}, c{s}{2 * u}, p;"
        f" fma.rn.f32 ${2 * s + u}, c{s}0, ${32 + 8 * u + 4 * s}, ${2 * s + u};"
        for s in range(2)
        for u in range(2)
    )
    sums = ", ".join(f"c{s}{i}" for s in range(2) for i in range(4))
    return f"{{ .reg .b32 a0, a1, a2, a3, t; .reg .f32 {sums}; .reg .pred p; {zero} {products} {odd} {add} }}"


def e2m1(codes: jax.Array, nibble: int) -> jax.Array:
    """The values of one code of each 16-bit word, float32."""
    code = codes.astype(jnp.int32) >> (4 * nibble)
    exponent, half = (code >> 1 & 3).astype(jnp.float32), (code & 1) * 0.5
    value = jnp.where(exponent > 0, (1 + half) * 2.0 ** (exponent - 1), half)
    return jnp.where(code & 8, -value, value)


def registers(first: int, count: int) -> str:
    """Operands in a row: "$4, $5"."""
    return ", ".join(f"${first + i}" for i in range(count))


def asm(text: str, constraints: str, args: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """Inline PTX over the 8 elements that each lane holds of every argument."""
    return plt.elementwise_inline_asm(
        text,
        args=args,
        constraints=",".join(constraints.split()),
        pack=8,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )[0]
