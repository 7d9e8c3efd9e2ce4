"""A block's warps in numpy: they run inline PTX as a GPU would, and what JAX computes around it with subnormals kept.

Only what the kernels' inline PTX uses is known; anything else raises. Registers are uint32 [warps, 32], one a lane;
predicates are bool.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.extend import core

LANES = 32
LANE = np.arange(LANES, dtype=np.uint32)
SMID = 17  # the multiprocessor that the block runs on


def inline_asm(text, *, args, constraints, pack, result_shape_dtypes):
    """`plt.elementwise_inline_asm` on arrays [warps, 8, 4, 8], of which lane 4 * i + j holds [:, i, j]."""
    [result] = result_shape_dtypes
    assert pack == 8 and result.shape == args[0].shape and result.shape[1:] == (8, 4, 8)
    words = np.concatenate([_to_registers(arg) for arg in args])
    registers, outputs = {}, 0
    for operand, constraint in enumerate(constraints.split(",")):
        if constraint in ("=&r", "=&f"):
            outputs += 1
            continue
        word, words = words[0], words[1:]
        # A tied input lies in its output's register.
        registers[f"${constraint if constraint.isdigit() else operand}"] = word
        assert constraint in ("r", "f") or int(constraint) < outputs, constraint
    assert not len(words), f"{len(words)} registers of arguments too many"
    block = Block(registers, [f"${i}" for i in range(outputs)])
    block.run(text)
    # Reading what was never written raises.
    return [_from_registers([block.read(f"${i}") for i in range(outputs)], result)]


def _to_registers(array):
    """[warps, 8, 4, 8] -> [registers, warps, 32]: elements of 16 bits two a register, the first in the low half."""
    array = np.ascontiguousarray(array)
    words = array.reshape(len(array), LANES, 8).view(np.uint32)
    return np.moveaxis(words, -1, 0)


def _from_registers(registers, result):
    words = np.ascontiguousarray(np.stack(registers, axis=-1))
    return jnp.asarray(words.view(result.dtype).reshape(result.shape))


class Block:
    """The state of warps that run one text: `registers` by name, and of those that can be written whether they are
    predicates."""

    def __init__(self, registers, outputs):
        self.registers, self.writable = dict(registers), dict.fromkeys(outputs, False)
        self.shape = next(iter(registers.values())).shape

    def run(self, text):
        body = re.fullmatch(r"\s*\{(.*)\}\s*", text, re.DOTALL)
        assert body, "a text is a scope of its own"
        for line in filter(None, (line.strip() for line in body[1].split(";"))):
            name, operands = line.split(maxsplit=1)
            if name == ".reg":
                kind, names = operands.split(maxsplit=1)
                assert kind in (".b32", ".f32", ".pred"), line
                self.writable |= {name.strip(): kind == ".pred" for name in names.split(",")}
            elif name == MMA:
                self._mma(*([item.strip() for item in group.split(",")] for group in re.findall(r"{(.*?)}", operands)))
            else:
                operation, kinds = OPERATIONS[name]
                target, *sources = [operand.strip() for operand in operands.split(",")]
                values = [self.read(source) for source in sources]
                assert "".join("p" if value.dtype == bool else "r" for value in values) == kinds, line
                self.write(target, operation(*values))

    def read(self, operand):
        if operand == "%laneid":
            return np.broadcast_to(LANE, self.shape)
        if operand == "%smid":
            return np.full(self.shape, SMID, np.uint32)
        if match := re.fullmatch(r"0f([0-9A-Fa-f]{8})|0x([0-9A-Fa-f]+)", operand):
            return np.full(self.shape, int(match[1] or match[2], 16), np.uint32)
        if re.fullmatch(r"-?\d+", operand):
            return np.full(self.shape, int(operand) % 2**32, np.uint32)
        return self.registers[operand]  # KeyError: not written yet

    def write(self, target, value):
        assert self.writable.get(target) == (value.dtype == bool), target
        self.registers[target] = value if value.dtype == bool else value.astype(np.uint32)

    def _mma(self, d, a, b, c):
        """D = A B + C. Lane 4 * g + t holds, after the PTX ISA's "Matrix Fragments for mma.m16n8k16":

        A [16, 16]: rows g, g + 8, g, g + 8 at columns 2 * t, 2 * t + 1, of the last two registers 8 columns on.
        B [16, 8]: rows 2 * t, 2 * t + 1 and those 8 further, column g. C, D [16, 8]: rows g, g, g + 8, g + 8, columns
        2 * t, 2 * t + 1 each.
        """
        assert [len(operand) for operand in (d, a, b, c)] == [4, 4, 2, 4]
        g, t = LANE // 4, LANE % 4
        left, right = np.zeros((self.shape[0], 16, 16)), np.zeros((self.shape[0], 16, 8))
        total = np.zeros((self.shape[0], 16, 8))
        for i in range(2):
            for j, name in enumerate(a):
                left[:, g + 8 * (j % 2), 2 * t + i + 8 * (j // 2)] = bfloat16(self.read(name))[..., i]
            for j, name in enumerate(b):
                right[:, 2 * t + i + 8 * j, g] = bfloat16(self.read(name))[..., i]
        for i, name in enumerate(c):
            total[:, g + 8 * (i // 2), 2 * t + i % 2] = float32(self.read(name))
        total = (left @ right + total).astype(np.float32)
        for i, name in enumerate(d):
            self.write(name, np.ascontiguousarray(total[:, g + 8 * (i // 2), 2 * t + i % 2]).view(np.uint32))


MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def bfloat16(register):
    """The two values in each register, float64 [..., 2]."""
    return np.ascontiguousarray(register)[..., None].view(ml_dtypes.bfloat16).astype(np.float64)


def float32(register):
    return np.ascontiguousarray(register).view(np.float32).astype(np.float64)


def _lop3(a, b, c, table):
    """Bit by bit the entry of `table` that the three bits number."""
    table, out = int(table.flat[0]), np.zeros_like(a)
    for entry in range(8):
        if table >> entry & 1:
            out |= (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)
    return out


def _prmt(a, b, selector):
    """Four bytes of the eight of b:a, each by a nibble of the selector."""
    eight, out = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.zeros_like(a)
    for byte in range(4):
        which = selector >> np.uint32(4 * byte) & np.uint32(15)
        assert (which < 8).all(), "prmt with a replicated sign"
        out |= (eight >> (8 * which).astype(np.uint64) & np.uint64(0xFF)).astype(np.uint32) << np.uint32(8 * byte)
    return out


def _shift(up):
    def shift(a, by):
        assert (by < 32).all(), "a shift by more than the register has"
        return a << by if up else a >> by

    return shift


def _shuffle(a, lane, clamp, members):
    assert (clamp == 31).all() and (members == 2**32 - 1).all(), "shfl among a part of the warp"
    assert (lane < LANES).all(), "shfl from a lane that is not there"
    return np.take_along_axis(a, lane.astype(np.int64), axis=1)


def _barrier(number, some):
    """What all threads agree on: whether `some` is set in one of them."""
    assert (number == 0).all(), "a barrier of a part of the block"
    return np.full_like(some, some.any())


def _select(a, b, first):
    return np.where(first, a, b)


def _multiply(a, b):
    """Subnormals are kept, as by mul's bf16 forms; in float64 the product is exact."""
    product = (bfloat16(a) * bfloat16(b)).astype(ml_dtypes.bfloat16)
    return product.view(np.uint32)[..., 0]


def _fma(a, b, c):
    """The product is exact in float64; the sum is rounded there once more than by fma, beyond what a comparison of
    sums in another order sees."""
    return (float32(a) * float32(b) + float32(c)).astype(np.float32).view(np.uint32)


# What is known, and its operands: registers or predicates.
OPERATIONS = {
    "mov.b32": (lambda a: a, "r"),
    "mov.u32": (lambda a: a, "r"),
    "mov.f32": (lambda a: a, "r"),
    "and.b32": (lambda a, b: a & b, "rr"),
    "add.u32": (lambda a, b: a + b, "rr"),
    "shl.b32": (_shift(up=True), "rr"),
    "shr.b32": (_shift(up=False), "rr"),
    "shr.u32": (_shift(up=False), "rr"),
    "lop3.b32": (_lop3, "rrrr"),
    "prmt.b32": (_prmt, "rrr"),
    "setp.eq.u32": (lambda a, b: a == b, "rr"),
    "setp.ne.u32": (lambda a, b: a != b, "rr"),
    "selp.b32": (_select, "rrp"),
    "selp.f32": (_select, "rrp"),
    "mul.rn.bf16x2": (_multiply, "rr"),
    "fma.rn.f32": (_fma, "rrr"),
    "shfl.sync.idx.b32": (_shuffle, "rrrr"),
    "bar.red.or.pred": (_barrier, "rp"),
}


def evaluate(fn, *args):
    """`fn` of arrays, in numpy, which keeps subnormals as GPUs do; XLA's CPU code takes them for zero."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    values = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    values |= dict(zip(jaxpr.jaxpr.invars, map(np.asarray, args), strict=True))
    for equation in jaxpr.eqns:
        operands = [x.val if isinstance(x, core.Literal) else values[x] for x in equation.invars]
        [variable] = equation.outvars
        values[variable] = NUMPY[equation.primitive.name](*operands, **equation.params)
    [out] = jaxpr.jaxpr.outvars
    return values[out]


def _broadcast(x, *, shape, broadcast_dimensions, **_):
    lie = [1] * len(shape)
    for size, axis in zip(x.shape, broadcast_dimensions, strict=True):
        lie[axis] = size
    return np.broadcast_to(np.reshape(x, lie), shape)


NUMPY = {
    "convert_element_type": lambda x, *, new_dtype, **_: np.asarray(x).astype(new_dtype),
    "bitcast_convert_type": lambda x, *, new_dtype: np.ascontiguousarray(x).view(new_dtype),
    "shift_left": lambda x, by: x << by,
    "mul": lambda x, y, **_: x * y,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda x, *, new_sizes, **_: np.reshape(x, new_sizes),
}
