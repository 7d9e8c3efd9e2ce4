"""Matrix tiles as the warps of a decode kernel hold them: what every GEMV of a decode step is made of.

A decode step multiplies a few tokens with large matrices, each weight used once. So weights go from memory straight to
the registers in which `mma.sync.m16n8k16` (PTX ISA, "Matrix Fragments for mma.m16n8k16") wants its 16 x 16 operand, and
nothing passes through shared memory. All arrays of a tile have the shape [warps, 8, 4, 8]:

    axis 0    the warp: warps lie side by side along the columns
    axis 1, 2 the lane 4 * g + t of a warp
    axis 3    what the lane itself holds: 16 bytes of weights, 8 activations, 8 float32 accumulators

A warp reads whole lines of memory, 128 bytes of each of four rows: half lines reach 2.7 TB/s on an H200 where these
reach 4.3. So lane (g, t) holds row g // 2 and, of the line's eight pieces of 16 bytes, piece 4 * (g % 2) + t. A row
group is 8 rows of weights: two such arrays, rows 0 to 3 and 4 to 7. A piece is 32 columns in NVFP4 (four codes a
16-bit word) and 8 in BF16; a line, what one warp covers, 256 or 64. Which of the real columns is called which by `mma`
does not matter, so long as weights and activations agree: `mma` sums over them.

To `mma` the lanes g are 16 rows (with the second array), and every other one of them holds the second half of a line.
Its eight columns are tokens here, each with the activations of one half. That takes twice as many columns:

    up to 4 tokens     column n is token n // 2 with half n % 2
    5 to 8 tokens      two `mma`, one for each half, column n being token n

Of the accumulators a lane keeps those of its own half, when all columns are done: `finish` chooses, adds the halves of
a row and the warps.

    accumulator [w, g, t, 4 * s + 2 * u + n]: column 2 * t + n of `mma`, array u of the row group, part s of a piece

NVFP4 with one token is a case of its own (`Tiles.single`), since decoding is then what limits a kernel. Column
n = 2 * t + h is piece 4 * h + t, so that a lane's two sums belong to one block scale each, which multiplies a float32
sum instead of sixteen weights.

    accumulator [w, g, t, 2 * s + u]: array u of the row group, over part s (a scale's 16 columns) of the lane's pieces

Nothing here chooses Triton's layouts; they follow from the shape (32 lanes in C order, 8 elements a lane, one warp a
slice); a test reads them from the compiled kernel. Inline PTX has a plain twin each, taken when interpreting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.inline_ptx import BARRIER, MMA, asm, e2m1, mma_of_codes, place_codes, registers

LANES = (8, 4)
MAX_TOKENS = 8  # the N of the mma
ROW_GROUP = 8  # rows: the mma's M is two halves of each
LINE = 8  # lanes that hold a line of memory, 128 bytes
NVFP4_BLOCK = 16  # weights a block scale
# A code's bits, put where bfloat16 has them, are 2**-126 of its value. With a block scale times 2**116 they make 2**-10
# of the weight, inside bfloat16; with one token, activations times 2**64 bring the products back into float32's range.
SCALE_UNIT, SINGLE_UNIT = 2.0**116, 2.0**64


class Matrix(NamedTuple):
    """References to one matrix, or a stack of them: BF16 `weight` [*experts, out, in] alone, or NVFP4 `codes` uint16
    [*experts, out, in / 4], `scales` uint8 [*experts, out, in / 16], `global_scale` float32 [*experts]."""

    weight: Any
    scales: Any = None
    global_scale: Any = None

    @property
    def weight_format(self) -> str:
        """ "bf16" or "nvfp4"."""
        return "bf16" if self.scales is None else "nvfp4"


# By set and part (or nibble): see `Tiles.load_tokens` and `Tiles.spread`.
Activations = list[list[jax.Array]]


class Fragment(NamedTuple):
    """One tile of four rows in registers: weights [warps, 8, 4, 8], and in NVFP4 scale bytes [warps, 8, 4, 2]."""

    weight: jax.Array
    scales: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a kernel's warps share a matrix of `num_columns` columns.

    Attributes:
        num_columns: columns of the matrix (the length of an activation); a multiple of 8 (BF16) or 16 (NVFP4).
        num_warps: of the kernel; they split the columns.
        weight_format: "bf16" or "nvfp4".
        num_tokens: 1 to MAX_TOKENS.
        interpret: whether the kernel is interpreted, without inline PTX.
        groups: of warps, each of which has a matrix to itself.
        first_warp: the one with the first columns; those before it have none.
    """

    num_columns: int
    num_warps: int
    weight_format: str
    num_tokens: int
    interpret: bool
    groups: int = 1
    first_warp: int = 0

    @property
    def single(self) -> bool:
        """Whether mma's columns are pieces of one token instead of tokens."""
        return self.weight_format == "nvfp4" and self.num_tokens == 1

    @property
    def num_sets(self) -> int:
        """The `mma` that a tile takes, each with activations and accumulators of its own."""
        return 1 if self.num_tokens <= MAX_TOKENS // 2 else 2

    def unit(self) -> float:
        """What sums must be multiplied with besides a matrix' global scale."""
        if self.weight_format == "bf16":
            return 1.0
        return 2.0**126 / (SINGLE_UNIT if self.single else SCALE_UNIT)

    @property
    def lane_columns(self) -> int:
        """Columns of a row that one lane holds."""
        return 32 if self.weight_format == "nvfp4" else 8

    @property
    def step_columns(self) -> int:
        """Columns that the warps of a group cover together."""
        return self.num_warps // self.groups * LINE * self.lane_columns

    @property
    def num_steps(self) -> int:
        return -(-self.num_columns // self.step_columns)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.num_warps, *LANES, 8)

    def iota(self, axis: int, last: int = 8) -> jax.Array:
        """The place along an axis, as an array [warps, 8, 4, last]."""
        return lax.broadcasted_iota(jnp.int32, (self.num_warps, *LANES, last), axis)

    def _piece(self, step: Any, last: int = 8, half: int | None = None) -> jax.Array:
        """Which of a row's pieces a lane has; or has the activations of, in the set of a given half."""
        warps = self.num_warps // self.groups
        warp = self.iota(0, last) % warps if self.groups > 1 else self.iota(0, last) - self.first_warp
        half_of_line = self.iota(1, last) % 2 if half is None else half
        return (step * warps + warp) * LINE + half_of_line * 4 + self.iota(2, last)

    def fence(self) -> jax.Array:
        """An empty accumulator that is not there before everything loaded so far has been asked for.

        Whatever is added to it comes after. Without, a compiler asks for a few weights at a time, next to their use,
        and each few take the memory's whole latency. It is a barrier with a result: a compiler moves no load across it,
        and nothing that needs the result before it.
        """
        empty = jnp.zeros(self.shape, jnp.float32)
        if self.interpret:
            return empty
        text = f"mov.u32 t, %smid; setp.ne.u32 q, t, -1; {BARRIER} p, 0, q; selp.f32 $0, 0f00000000, 0f7FC00000, p;"
        text += "".join(f" mov.f32 ${i}, $0;" for i in range(1, 8))
        return asm(f"{{ .reg .b32 t; .reg .pred p, q; {text} }}", "=&f " * 8 + "f " * 8, [empty], jnp.float32)

    # -- weights ---------------------------------------------------------------------------------------------------

    def load(self, matrix: Matrix, step: int, row: Any, num_rows: int | None = None, experts: Any = None) -> Fragment:
        """Rows row .. row + 3, the columns of `step`; zeros past the columns and past `num_rows`, if given.

        `experts` is the number of one of a stack, or a list of one a group; where one of a list is
        negative, nothing is read.
        """
        arguments = (matrix, step, row, num_rows, experts)
        return Fragment(self._load_weight(*arguments), self._load_scales(*arguments))

    def _load_weight(self, matrix: Matrix, step: int, row: Any, num_rows: int | None = None, experts: Any = None):
        """Of `load` the weights, or codes, alone."""
        piece, r = self._piece(step), self.iota(1) // 2
        column = piece * self.lane_columns
        if self.num_columns % self.lane_columns:  # else a lane has all of its columns or none, and loads them at once
            column = column + self.lane_columns // 8 * self.iota(3)
        expert, mask = self._of_group(experts, 8)
        fits = self._inside(row, num_rows, r, column, mask)
        return _masked_load(matrix.weight, (row + r, piece * 8 + self.iota(3)), expert, fits)

    def _load_scales(self, matrix: Matrix, step: int, row: Any, num_rows: int | None = None, experts: Any = None):
        """Of `load` the scale bytes alone, if there are any."""
        if matrix.scales is None:
            return None
        block, r = self._piece(step, 2) * 2 + self.iota(3, 2), self.iota(1, 2) // 2
        expert, mask = self._of_group(experts, 2)
        fits = self._inside(row, num_rows, r, block * NVFP4_BLOCK, mask)
        return _masked_load(matrix.scales, (row + r, block), expert, fits)

    def _of_group(self, experts: Any, last: int) -> tuple[Any, Any]:
        """Each warp's expert and whether it has one."""
        if not isinstance(experts, list):
            return experts, None
        group = self.iota(0, last) // (self.num_warps // self.groups)
        expert = jnp.broadcast_to(experts[0], group.shape)
        for place, other in enumerate(experts[1:], 1):
            expert = jnp.where(group == place, other, expert)
        return jnp.maximum(expert, 0), expert >= 0

    def _inside(self, row: Any, num_rows: int | None, r: jax.Array, column: jax.Array, mask: Any) -> Any:
        """What lies inside the matrix; None where everything does."""
        fits = self._within(column, mask)
        return fits if num_rows is None else _both(fits, row + r < num_rows)

    def multiply(
        self,
        upper: Fragment,
        lower: Fragment,
        activations: Activations,
        accumulators: Sequence[jax.Array],
        empty: jax.Array,
    ) -> list[jax.Array]:
        """Adds a row group's tile times the step's activations (of `spread`) to the accumulators, one a set; `empty` is
        the fence's."""
        if self.weight_format == "bf16":
            return self._mma_sets(upper.weight, lower.weight, [parts[0] for parts in activations], accumulators)
        scales = [self._block_scales(part.scales) for part in (upper, lower)]
        if self.single:
            return [self._mma_single(upper.weight, lower.weight, scales, activations[0], accumulators[0], empty)]
        for nibble in range(4):
            rows, more_rows = (
                self._decode(part.weight, scale, nibble) for part, scale in zip((upper, lower), scales, strict=True)
            )
            accumulators = self._mma_sets(rows, more_rows, [parts[nibble] for parts in activations], accumulators)
        return list(accumulators)

    def _mma_sets(self, upper: jax.Array, lower: jax.Array, b: Sequence[jax.Array], accumulators: Sequence[jax.Array]):
        return [self._mma(upper, lower, part, total) for part, total in zip(b, accumulators, strict=True)]

    def _block_scales(self, scales: Any) -> jax.Array:
        """Scale bytes [warps, 8, 4, 2], one for each word of codes [warps, 8, 4, 8]: float32 in the single case, else
        bfloat16 times SCALE_UNIT."""
        if self.interpret:
            value = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.float32)
        else:
            # The byte's exponent and mantissa where float32 has them: 2**-120 of its value, a subnormal's too.
            value = lax.bitcast_convert_type(scales.astype(jnp.int32) << 20, jnp.float32) * 2.0**120
        if not self.single:
            value = (value * SCALE_UNIT).astype(jnp.bfloat16)
        return jnp.broadcast_to(value[..., None], (*value.shape, 4)).reshape(self.shape)

    def _decode(self, codes: jax.Array, scales: jax.Array, nibble: int) -> jax.Array:
        """The given code of each 16-bit word times its scale (of `_block_scales`) and 2**-126: bfloat16, exact."""
        if self.interpret:
            return (e2m1(codes, nibble) * (scales.astype(jnp.float32) * 2.0**-126)).astype(jnp.bfloat16)
        # mul.bf16x2 keeps subnormals.
        body = "".join(
            place_codes("e", "s", f"${4 + word}", nibble) + f"mul.rn.bf16x2 ${word}, e, ${8 + word};"
            for word in range(4)
        )
        return asm(f"{{ .reg .b32 e, s; {body} }}", "=&r " * 4 + "r " * 8, [codes, scales], jnp.bfloat16)

    def _mma(self, upper: jax.Array, lower: jax.Array, b: jax.Array, accumulator: jax.Array) -> jax.Array:
        """Rows g (upper) and g + 8 (lower) of `mma` times its columns, over 8 of a lane's: bfloat16 in, float32 out."""
        if self.interpret:
            split = (self.num_warps, *LANES, 2, 4)  # the two parts of a lane's columns
            rows = [a.reshape(split).astype(jnp.float32) for a in (upper, lower)]
            tokens = b.reshape(split).astype(jnp.float32)
            both = jnp.stack([jnp.einsum("wgtsk,wntsk->wgsn", a, tokens) for a in rows], axis=-2)  # [w, g, s, h, n]
            both = both.reshape(self.num_warps, 8, 2, 2, 4, 2).transpose(0, 1, 4, 2, 3, 5)
            return accumulator + both.reshape(self.shape)
        body = "".join(
            f"{MMA} {{{registers(4 * s, 4)}}}, {{${8 + 2 * s}, ${12 + 2 * s}, ${9 + 2 * s}, ${13 + 2 * s}}},"
            f" {{{registers(16 + 2 * s, 2)}}}, {{{registers(20 + 4 * s, 4)}}};"
            for s in range(2)
        )
        return asm(f"{{ {body} }}", "=&f " * 8 + "r " * 12 + "f " * 8, [upper, lower, b, accumulator], jnp.float32)

    def _mma_single(
        self,
        upper: jax.Array,
        lower: jax.Array,
        scales: list[jax.Array],
        b: Sequence[jax.Array],
        accumulator: jax.Array,
        empty: jax.Array,
    ) -> jax.Array:
        """A whole tile for one token: codes of both arrays in, scaled sums of the lane's own pieces out."""
        if self.interpret:
            own, sums = [self._of_own_piece(part) for part in b], []
            for codes, scale in zip((upper, lower), scales, strict=True):
                terms = [e2m1(codes, j) * own[j] for j in range(4)]
                parts = sum(terms) * scale * 2.0**-126
                sums.append(parts.reshape(self.num_warps, *LANES, 2, 4).sum(axis=-1))
            both = jnp.stack(sums, axis=-1).reshape(self.num_warps, *LANES, 4)
            return accumulator + jnp.concatenate([both, jnp.zeros_like(both)], axis=-1)
        # The tied operands come last and take no number of their own.
        return asm(
            mma_of_codes(),
            "=&f " * 8 + "r " * 24 + "f " * 24 + "0 1 2 3 4 5 6 7",
            [upper, lower, *b, *scales, empty, accumulator],
            jnp.float32,
        )

    # -- activations -----------------------------------------------------------------------------------------------

    @property
    def lane_parts(self) -> int:
        """Parts of 8 columns that a lane holds."""
        return self.lane_columns // 8

    def _own(self) -> jax.Array:
        """The single case: the lanes that hold activations, those of one piece each; the others hold zeros."""
        return self.token() == 0

    def token(self, last: int = 8) -> jax.Array:
        """The token whose activations a lane holds, [warps, 8, 4, last]; there may be fewer."""
        if self.single:
            return jnp.where(self.iota(1, last) // 2 == self.iota(2, last), 0, 1)
        return self.iota(1, last) // 2 if self.num_sets == 1 else self.iota(1, last)

    def _places(self, step: Any) -> list[list[tuple[jax.Array, Any]]]:
        """For each set and part the columns of a lane's activations, and which of them exist (None: all)."""
        halves = [None] if self.num_sets == 1 else [0, 1]
        columns = [[self._column(step, part, half) for part in range(self.lane_parts)] for half in halves]
        return [[(column, self._within(column - self.iota(3), None)) for column in parts] for parts in columns]

    def load_tokens(self, x: Any, step: int, slots: Any = None) -> Activations:
        """The activations x [tokens, columns] of a lane's token at the step's columns, in natural order: for each set
        one array [warps, 8, 4, 8] for each 8 columns of a lane. Zeros past the columns and, in the single case, where
        they are another lane's; past the tokens the last one's, of which nothing is kept.

        With `slots`, x is [slots, tokens, columns], and this is the one to take, or a list of one a group; a negative
        one in a list is not read.
        """
        slot, mask = self._of_group(slots, 8)
        token = jnp.minimum(self.token(), self.num_tokens - 1)
        if self.single:
            mask = _both(self._own(), mask)
        return [
            [_masked_load(x, (token, column), slot, _both(fits, mask)) for column, fits in parts]
            for parts in self._places(step)
        ]

    def load_columns(self, x: Any, step: int) -> Activations:
        """As `load_tokens`, a vector [columns] that is the same for all tokens."""
        return [[_masked_load(x, (column,), None, fits) for column, fits in parts] for parts in self._places(step)]

    def store_tokens(self, out: Any, activations: Activations, step: int, mask: Any) -> None:
        """The inverse of `load_tokens`, where `mask` is set."""
        token = self.token()  # lanes that store nothing point past the tokens, not at what others store
        for parts, places in zip(activations, self._places(step), strict=True):
            for values, (column, fits) in zip(parts, places, strict=True):
                plt.store(out.at[token, column], values, mask=_both(fits, mask & (token < self.num_tokens)))

    def sum_by_token(self, x: jax.Array) -> jax.Array:
        """The sum of a token's elements x [warps, 8, 4, 8] over the lanes that hold them, to each of these."""
        if self.single:
            return x.sum()
        halves = 2 if self.num_sets == 1 else 1
        parts = x.reshape(self.num_warps, 8 // halves, halves, 4, 8).transpose(1, 0, 2, 3, 4)
        sums = parts.reshape(8 // halves, -1).sum(axis=1)
        spread = jnp.broadcast_to(sums[None, :, None, None, None], (self.num_warps, 8 // halves, halves, 4, 8))
        return spread.reshape(self.shape)

    @property
    def lanes_hold_a_row(self) -> bool:
        """Whether four lanes that hold the same piece can hold its parts of all steps between them: see `share_row`."""
        return self.num_steps * self.lane_parts <= LANES[0] // 2

    def row_places(self) -> tuple[jax.Array, Any]:
        """Of one row of activations each lane holds one part, lane (g, t) part g // 2 % parts of step g // 2 // parts:
        its columns [warps, 8, 4, 8], and which of them exist."""
        place = self.iota(1) // 2
        column = self._column(place // self.lane_parts, place % self.lane_parts)
        return column, (place < self.num_steps * self.lane_parts) & (column < self.num_columns)

    def share_row(self, row: jax.Array, step: int) -> Activations:
        """A row held as of `row_places`, bfloat16, as `load_tokens` gives it, in the single case too."""
        return [[self._from_place(row, step * self.lane_parts + part) for part in range(self.lane_parts)]]

    def _from_place(self, values: jax.Array, place: int) -> jax.Array:
        """What the lane of the same piece with g // 2 == place holds; in the single case zero for lanes without
        activations."""
        if self.interpret:
            split = values.reshape(self.num_warps, 4, 2, *values.shape[2:])
            shared = jnp.broadcast_to(split[:, place : place + 1], split.shape).reshape(values.shape)
            return jnp.where(self._own(), shared, jnp.zeros((), values.dtype)) if self.single else shared
        lane = f"mov.u32 l, %laneid; and.b32 t, l, 7; add.u32 t, t, {LINE * place};"
        keep = ""
        if self.single:
            lane += " shr.u32 u, l, 3; and.b32 l, l, 3; setp.eq.u32 p, u, l;"
            keep = "selp.b32 ${i}, ${i}, 0, p;"
        body = "".join(f"shfl.sync.idx.b32 ${i}, ${4 + i}, t, 31, -1;" + keep.replace("{i}", str(i)) for i in range(4))
        text = f"{{ .reg .b32 l, t, u; .reg .pred p; {lane} {body} }}"
        return asm(text, "=&r " * 4 + "r " * 4, [values], jnp.bfloat16)

    def _of_own_piece(self, values: jax.Array) -> jax.Array:
        """Interpreted, the single case: to each lane what the lane that has its piece's activations holds, float32."""
        split = values.astype(jnp.float32).reshape(self.num_warps, 4, 2, 4, 8)
        held = lax.broadcasted_iota(jnp.int32, split.shape, 1) == lax.broadcasted_iota(jnp.int32, split.shape, 3)
        one = jnp.where(held, split, 0.0).sum(axis=1, keepdims=True)
        return jnp.broadcast_to(one, split.shape).reshape(values.shape)

    def _column(self, step: Any, part: Any, half: int | None = None) -> jax.Array:
        return self._piece(step, half=half) * self.lane_columns + 8 * part + self.iota(3)

    def _within(self, column: jax.Array, mask: Any) -> Any:
        """`mask`, and that the columns exist."""
        if self.first_warp:
            return _both((column >= 0) & (column < self.num_columns), mask)
        return mask if self.num_columns % self.step_columns == 0 else _both(column < self.num_columns, mask)

    def spread(self, activations: Activations) -> Activations:
        """Activations in natural order, bfloat16, as `multiply` takes them.

        In NVFP4 the codes of one nibble are columns j, j + 4, j + 8, ... of a lane's 32: so must be the activations.
        """
        if self.weight_format == "bf16":
            return activations
        return [[self._every_fourth(parts, nibble) for nibble in range(4)] for parts in activations]

    def _every_fourth(self, parts: Sequence[jax.Array], nibble: int) -> jax.Array:
        """[warps, 8, 4, 8]; in the single case times SINGLE_UNIT."""
        if self.interpret:
            lane = jnp.stack(parts, axis=3).reshape(self.num_warps, *LANES, 8, 4)[..., nibble]
            return (lane.astype(jnp.float32) * SINGLE_UNIT).astype(jnp.bfloat16) if self.single else lane
        half = "0x7632" if nibble % 2 else "0x5410"
        body = "".join(
            f"prmt.b32 ${word}, ${4 + 4 * word + nibble // 2}, ${6 + 4 * word + nibble // 2}, {half};"
            for word in range(4)
        )
        if self.single:  # 0x5F80 is 2**64
            body += "".join(f"mul.rn.bf16x2 ${word}, ${word}, u;" for word in range(4))
            body = f".reg .b32 u; mov.b32 u, 0x5F805F80; {body}"
        return asm(f"{{ {body} }}", "=&r " * 4 + "r " * 16, list(parts), jnp.bfloat16)

    # -- results ---------------------------------------------------------------------------------------------------

    def finish(self, accumulators: Sequence[Sequence[jax.Array]]) -> jax.Array:
        """The sums of several row groups over halves of a line and over warps, all at once, so that it takes one
        exchange through shared memory: [*groups, *rows, n]. n is the number of row groups, filled up to a power of
        two. Which element is what: `places`."""
        arrays = [self._of_own_half(sets) for sets in accumulators]
        arrays += [jnp.zeros_like(arrays[0])] * (pl.next_power_of_2(len(arrays)) - len(arrays))
        stacked = _stacked(arrays)  # [warps, 8, 4, k, n]
        split = stacked.reshape(self.groups, -1, 4, 2, 4, *stacked.shape[3:])
        # In the single case the lanes of a row hold parts of one sum, else they are different tokens.
        kept, summed = ((0, 2), (1, 3, 4)) if self.single else ((0, 2, 4), (1, 3))
        order = (*kept, 5, 6, *summed)
        shape = [split.shape[axis] for axis in (*kept, 5, 6)]
        total = split.transpose(order).reshape(*shape, -1).sum(axis=-1)
        return total if self.groups > 1 else total.reshape(total.shape[1:])

    def _of_own_half(self, sets: Sequence[jax.Array]) -> jax.Array:
        """What a lane keeps of a row group's accumulators, and adds over the parts of its pieces: [warps, 8, 4, 2], in
        the case of two sets [warps, 8, 4, 4]."""
        shape = (self.num_warps, *LANES)
        if self.single:
            return sets[0].reshape(*shape, 4, 2).sum(axis=3)
        if self.num_sets == 2:
            first, second = (part.reshape(*shape, 2, 4).sum(axis=3) for part in sets)
            return jnp.where(lax.broadcasted_iota(jnp.int32, first.shape, 1) % 2 == 0, first, second)
        split = sets[0].reshape(*shape, 4, 2)
        half = lax.broadcasted_iota(jnp.int32, split.shape, 4)
        own = jnp.where(half == lax.broadcasted_iota(jnp.int32, split.shape, 1) % 2, split, 0.0).sum(axis=4)
        return own.reshape(*shape, 2, 2).sum(axis=3)

    def places(self, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """Of each element of a finished array, the row (counted from the first row group's first) and the token."""
        iota = [lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(len(shape))]
        if self.single:
            r, u, group = iota[-3:]
            return ROW_GROUP * group + 4 * u + r, jnp.zeros(shape, jnp.int32)
        r, t, i, group = iota[-4:]
        if self.num_sets == 1:
            return ROW_GROUP * group + 4 * i + r, t
        return ROW_GROUP * group + 4 * (i // 2) + r, 2 * t + i % 2


def _stacked(arrays: Sequence[jax.Array]) -> jax.Array:
    """Arrays side by side on a new last axis; a power of two of them, two at a time, as Triton joins them."""
    if len(arrays) == 1:
        return arrays[0][..., None]
    both = jnp.stack([_stacked(arrays[0::2])[..., :], _stacked(arrays[1::2])[..., :]], axis=-1)
    return both.reshape(*both.shape[:-2], len(arrays))


def _both(fits: Any, mask: Any) -> Any:
    """Both of two masks, either of which may be None."""
    if fits is None or mask is None:
        return mask if fits is None else fits
    return fits & mask


def _masked_load(ref: Any, at: tuple, expert: Any, fits: Any) -> jax.Array:
    view = ref.at[at] if expert is None else ref.at[(expert, *at)]
    if fits is None:
        return plt.load(view)
    mask = jnp.broadcast_to(fits, jnp.broadcast_shapes(*(jnp.shape(i) for i in at)))
    return plt.load(view, mask=mask, other=jnp.zeros((), ref.dtype))
