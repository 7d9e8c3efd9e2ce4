"""Matrix tiles as the warps of a decode kernel hold them: what every GEMV of a decode step is made of.

A decode step multiplies a few tokens with large matrices, each weight used once. So weights go from memory straight to
the registers in which `mma.sync.m16n8k16` (PTX ISA, "Matrix Fragments for mma.m16n8k16") wants its 16 x 16 operand, and
nothing passes through shared memory. All arrays of a tile have the shape [warps, 8, 4, 8]:

    axis 0    the warp: warps lie side by side along the columns
    axis 1, 2 the lane 4 * g + t of a warp: g is a row of the weights (or a token), t a quarter of the tile's columns
    axis 3    what the lane itself holds: 16 bytes of weights, 8 activations, 8 float32 accumulators

A row group is 16 rows of weights: two such arrays, rows g and g + 8. One tile covers 128 columns in NVFP4 (16 bytes are
32 codes, four a 16-bit word) and 32 in BF16. Which of the real columns is called which by `mma` does not matter, so
long as weights and activations agree: `mma` sums over them.

    accumulator [w, g, t, 4 * s + 2 * h + n] is row g + 8 * h of the group times token 2 * t + n, over part s of the
    columns; `finish` adds the parts and the warps.

NVFP4 with one token is a case of its own (`Tiles.single`), since decoding is then what limits a kernel. The eight
columns that `mma` has for tokens take the eight scale groups of a tile instead: lane g = 2 * t + s holds the
activations of group 2 * t + s, half s of the columns of lanes t, the others hold zeros. So a block scale multiplies one
float32 sum instead of sixteen weights.

    accumulator [w, g, t, 2 * s + h] is row g + 8 * h over scale group 2 * t + s of each tile; the rest is not used.

Nothing here chooses Triton's layouts; they follow from the shape (32 lanes in C order, 8 elements a lane, one warp a
slice), and a test reads them from the compiled kernel. Inline PTX has a plain twin each, taken when interpreting.
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

LANES = (8, 4)
MAX_TOKENS = 8  # the N of the mma
ROW_GROUP = 16  # its M
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


class Fragment(NamedTuple):
    """One tile of eight rows in registers: weights [warps, 8, 4, 8], and in NVFP4 scale bytes [warps, 8, 4, 2]."""

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
    """

    num_columns: int
    num_warps: int
    weight_format: str
    num_tokens: int
    interpret: bool
    groups: int = 1

    @property
    def single(self) -> bool:
        """Whether mma's columns are scale groups instead of tokens."""
        return self.weight_format == "nvfp4" and self.num_tokens == 1

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
        return self.num_warps // self.groups * 4 * self.lane_columns

    @property
    def num_steps(self) -> int:
        return -(-self.num_columns // self.step_columns)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.num_warps, *LANES, 8)

    def iota(self, axis: int, last: int = 8) -> jax.Array:
        """The place along an axis, as an array [warps, 8, 4, last]."""
        return lax.broadcasted_iota(jnp.int32, (self.num_warps, *LANES, last), axis)

    def _lane(self, step: Any, last: int = 8) -> jax.Array:
        """Which share of the matrix's columns a lane has."""
        warps = self.num_warps // self.groups
        warp = self.iota(0, last) % warps if self.groups > 1 else self.iota(0, last)
        return (step * warps + warp) * 4 + self.iota(2, last)

    def zeros(self) -> jax.Array:
        """An empty accumulator."""
        return jnp.zeros(self.shape, jnp.float32)

    # -- weights ---------------------------------------------------------------------------------------------------

    def load(self, matrix: Matrix, step: int, row: Any, num_rows: int | None = None, experts: Any = None) -> Fragment:
        """Rows row .. row + 7, the columns of `step`; zeros past the columns and past `num_rows`, if given.

        `experts` is the number of one of a stack, or a list of one a group; where one of a list is
        negative, nothing is read.
        """
        codes = self.weight_format == "nvfp4"
        lane = self._lane(step)
        column = lane * self.lane_columns + (4 if codes else 1) * self.iota(3)
        expert, mask = self._of_group(experts, 8)
        fits = self._inside(row, num_rows, self.iota(1), column, mask)
        weight = _masked_load(matrix.weight, (row + self.iota(1), lane * 8 + self.iota(3)), expert, fits)
        if not codes:
            return Fragment(weight, None)
        block = self._lane(step, 2) * 2 + self.iota(3, 2)
        expert, mask = self._of_group(experts, 2)
        fits = self._inside(row, num_rows, self.iota(1, 2), block * NVFP4_BLOCK, mask)
        return Fragment(weight, _masked_load(matrix.scales, (row + self.iota(1, 2), block), expert, fits))

    def _of_group(self, experts: Any, last: int) -> tuple[Any, Any]:
        """Each warp's expert and whether it has one."""
        if not isinstance(experts, list):
            return experts, None
        group = self.iota(0, last) // (self.num_warps // self.groups)
        expert = jnp.broadcast_to(experts[0], group.shape)
        for place, other in enumerate(experts[1:], 1):
            expert = jnp.where(group == place, other, expert)
        return jnp.maximum(expert, 0), expert >= 0

    def _inside(self, row: Any, num_rows: int | None, g: jax.Array, column: jax.Array, mask: Any) -> Any:
        """What lies inside the matrix; None where everything does."""
        fits = mask
        if self.num_columns % self.step_columns:
            inside = column < self.num_columns
            fits = inside if fits is None else fits & inside
        if num_rows is not None:
            inside = row + g < num_rows
            fits = inside if fits is None else fits & inside
        return fits

    def multiply(
        self, upper: Fragment, lower: Fragment, activations: Sequence[jax.Array], accumulator: jax.Array
    ) -> jax.Array:
        """Adds a row group's tile times the step's `activations` (of `spread`) to the accumulator."""
        if self.weight_format == "bf16":
            return self._mma(upper.weight, lower.weight, activations[0], accumulator)
        scales = [self._block_scales(part.scales) for part in (upper, lower)]
        if self.single:
            return self._mma_single(upper.weight, lower.weight, scales, activations, accumulator)
        for nibble in range(4):
            rows = self._decode(upper.weight, scales[0], nibble)
            more_rows = self._decode(lower.weight, scales[1], nibble)
            accumulator = self._mma(rows, more_rows, activations[nibble], accumulator)
        return accumulator

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
            return (_e2m1(codes, nibble) * (scales.astype(jnp.float32) * 2.0**-126)).astype(jnp.bfloat16)
        # mul.bf16x2 keeps subnormals.
        body = "".join(
            _place_codes("e", "s", f"${4 + word}", nibble) + f"mul.rn.bf16x2 ${word}, e, ${8 + word};"
            for word in range(4)
        )
        return _asm(f"{{ .reg .b32 e, s; {body} }}", "=&r " * 4 + "r " * 8, [codes, scales], jnp.bfloat16)

    def _mma(self, upper: jax.Array, lower: jax.Array, b: jax.Array, accumulator: jax.Array) -> jax.Array:
        """Rows g (upper) and g + 8 (lower) times tokens, over the lanes' 8 columns; bfloat16 in, float32 out."""
        if self.interpret:
            split = (self.num_warps, *LANES, 2, 4)  # the two parts of a lane's columns
            rows = [a.reshape(split).astype(jnp.float32) for a in (upper, lower)]
            tokens = b.reshape(split).astype(jnp.float32)
            both = jnp.stack([jnp.einsum("wgtsk,wntsk->wgsn", a, tokens) for a in rows], axis=-2)  # [w, g, s, h, n]
            both = both.reshape(self.num_warps, 8, 2, 2, 4, 2).transpose(0, 1, 4, 2, 3, 5)
            return accumulator + both.reshape(self.shape)
        body = "".join(
            f"{MMA} {{{_registers(4 * s, 4)}}}, {{${8 + 2 * s}, ${12 + 2 * s}, ${9 + 2 * s}, ${13 + 2 * s}}},"
            f" {{{_registers(16 + 2 * s, 2)}}}, {{{_registers(20 + 4 * s, 4)}}};"
            for s in range(2)
        )
        return _asm(f"{{ {body} }}", "=&f " * 8 + "r " * 12 + "f " * 8, [upper, lower, b, accumulator], jnp.float32)

    def _mma_single(
        self,
        upper: jax.Array,
        lower: jax.Array,
        scales: list[jax.Array],
        b: Sequence[jax.Array],
        accumulator: jax.Array,
    ) -> jax.Array:
        """A whole tile for one token: codes of rows g and g + 8 in, scaled sums out."""
        if self.interpret:
            sums = []
            for codes, scale in zip((upper, lower), scales, strict=True):
                # Only lane g = 2 * t + s has the activations of its scale group: half s of the words.
                own = self.iota(1) - 2 * self.iota(2) == self.iota(3) // 4
                x = [jnp.where(own, part.astype(jnp.float32), 0.0).sum(axis=1, keepdims=True) for part in b]
                terms = [_e2m1(codes, j) * x[j] for j in range(4)]
                parts = sum(terms) * scale * 2.0**-126
                sums.append(parts.reshape(self.num_warps, *LANES, 2, 4).sum(axis=-1))
            both = jnp.stack(sums, axis=-1).reshape(self.num_warps, *LANES, 4)
            return accumulator + jnp.concatenate([both, jnp.zeros_like(both)], axis=-1)
        # Operands: 0..7 the sum, 8..11 and 12..15 codes, 16..31 activations by nibble, 32..39 and 40..47 scales.
        zero = "".join(f"mov.f32 c{s}{i}, 0f00000000;" for s in range(2) for i in range(4))
        products = "".join(
            "".join(
                _place_codes(f"a{2 * word + half}", "t", f"${8 + 4 * half + 2 * s + word}", nibble)
                for word in range(2)
                for half in range(2)
            )
            + f"{MMA} {{c{s}0, c{s}1, c{s}2, c{s}3}}, {{a0, a1, a2, a3}},"
            f" {{{_registers(16 + 4 * nibble, 2)}}}, {{c{s}0, c{s}1, c{s}2, c{s}3}};"
            for nibble in range(4)
            for s in range(2)
        )
        add = "".join(
            f"fma.rn.f32 ${2 * s + half}, c{s}{2 * half + s}, ${32 + 8 * half + 4 * s}, ${2 * s + half};"
            for s in range(2)
            for half in range(2)
        )
        sums = ", ".join(f"c{s}{i}" for s in range(2) for i in range(4))
        text = f"{{ .reg .b32 a0, a1, a2, a3, t; .reg .f32 {sums}; {zero} {products} {add} }}"
        ties = " ".join(str(i) for i in range(8))
        # The tied operands come last and take no number of their own.
        return _asm(
            text, "=&f " * 8 + "r " * 24 + "f " * 16 + ties, [upper, lower, *b, *scales, accumulator], jnp.float32
        )

    # -- activations -----------------------------------------------------------------------------------------------

    @property
    def lane_parts(self) -> int:
        """Parts of 8 columns that a lane holds."""
        return self.lane_columns // 8

    def load_tokens(self, x: Any, step: int, slots: list | None = None) -> list[jax.Array]:
        """Token g's activations x [tokens, columns] at the step's columns, in natural order: one array [warps, 8, 4, 8]
        for each 8 columns of a lane. Zeros past the columns; past the tokens the last one's, of which nothing is kept.

        With `slots`, x is [slots, tokens, columns] and each group takes one; a negative one is not read. In the single
        case two arrays, of what `_own_places` says.
        """
        slot, mask = self._of_group(slots, 8)
        if self.single:
            return [
                _masked_load(x, (self.iota(1) * 0, column), slot, fits if mask is None else fits & mask)
                for column, fits in self._own_places(step)
            ]
        token = jnp.minimum(self.iota(1), self.num_tokens - 1)
        places = [self._column(step, part) for part in range(self.lane_parts)]
        return [_masked_load(x, (token, column), slot, self._within(column, mask)) for column in places]

    def _own_places(self, step: int) -> list[tuple[jax.Array, jax.Array]]:
        """The single case: lane g = 2 * t + s holds the two parts of scale group 2 * t + s, the others none. Columns,
        and which of them exist."""
        s = self.iota(1) - 2 * self.iota(2)
        own = (s >= 0) & (s < 2)
        columns = [self._column(step, 2 * s + part) for part in range(2)]
        return [(column, own & (column < self.num_columns)) for column in columns]

    def load_columns(self, x: Any, step: int) -> list[jax.Array]:
        """As `load_tokens`, a vector [columns] that is the same for all tokens."""
        return [_masked_load(x, (column,), None, fits) for column, fits in self._places_of_step(step)]

    def store_tokens(self, out: Any, parts: Sequence[jax.Array], step: int, mask: Any) -> None:
        """The inverse of `load_tokens`, where `mask` is set."""
        for values, (column, fits) in zip(parts, self._places_of_step(step), strict=True):
            # Lanes that store nothing point past the tokens, not at what others store: interpreted, they write it back.
            token = jnp.where(fits, 0, 1) if self.single else self.iota(1)
            fits = mask if fits is None else mask & fits
            plt.store(out.at[token, column], values, mask=fits & (token < self.num_tokens))

    def _places_of_step(self, step: int) -> list[tuple[jax.Array, Any]]:
        """Columns of each part of `load_tokens`, and which of them exist (None: all)."""
        if self.single:
            return list(self._own_places(step))
        columns = [self._column(step, part) for part in range(self.lane_parts)]
        return [(column, self._within(column, None)) for column in columns]

    @property
    def lanes_hold_a_row(self) -> bool:
        """Whether the 8 lanes g can hold the parts of one row between them: see `share_row`."""
        return self.num_steps * self.lane_parts <= LANES[0]

    def row_places(self) -> tuple[jax.Array, Any]:
        """Of one row of activations each lane holds one part, lane g part g % parts of step g // parts: its columns
        [warps, 8, 4, 8], and which of them exist."""
        g = self.iota(1)
        column = self._column(g // self.lane_parts, g % self.lane_parts)
        return column, (g < self.num_steps * self.lane_parts) & (column < self.num_columns)

    def share_row(self, row: jax.Array, step: int) -> list[jax.Array]:
        """A row held as of `row_places`, bfloat16, as `load_tokens` gives it, in the single case too."""
        first = step * self.lane_parts
        if not self.single:
            return [self._from_lane(row, first + part) for part in range(self.lane_parts)]
        return [self._from_lane(row, first + part, own=True) for part in range(2)]

    def _from_lane(self, values: jax.Array, g: int, own: bool = False) -> jax.Array:
        """What lane g holds, for all g; or with `own`, what lane g + 2 * s holds for the lanes of scale group
        2 * t + s, and zero for the others."""
        if self.interpret:
            if not own:
                return jnp.broadcast_to(values[:, g : g + 1], values.shape)
            s = self.iota(1) - 2 * self.iota(2)
            shared = jnp.where(s == 0, values[:, g : g + 1], values[:, g + 2 : g + 3])
            return jnp.where((s == 0) | (s == 1), shared, jnp.zeros((), values.dtype))
        lane = "mov.u32 l, %laneid; and.b32 t, l, 3;"
        if not own:
            body = "".join(f"shfl.sync.idx.b32 ${i}, ${4 + i}, l, 31, -1;" for i in range(4))
            text = f"{{ .reg .b32 l, t; {lane} add.u32 l, t, {4 * g}; {body} }}"
            return _asm(text, "=&r " * 4 + "r " * 4, [values], jnp.bfloat16)
        lane += " shr.u32 l, l, 2; sub.u32 l, l, t; sub.u32 l, l, t; setp.lt.u32 p, l, 2;"  # l is now s
        lane += " and.b32 l, l, 1; shl.b32 l, l, 3;"
        body = "".join(f"shfl.sync.idx.b32 ${i}, ${4 + i}, l, 31, -1; selp.b32 ${i}, ${i}, 0, p;" for i in range(4))
        text = f"{{ .reg .b32 l, t; .reg .pred p; {lane} add.u32 l, l, t; add.u32 l, l, {4 * g}; {body} }}"
        return _asm(text, "=&r " * 4 + "r " * 4, [values], jnp.bfloat16)

    def _column(self, step: Any, part: Any) -> jax.Array:
        return self._lane(step) * self.lane_columns + 8 * part + self.iota(3)

    def _within(self, column: jax.Array, mask: Any) -> Any:
        if self.num_columns % self.step_columns == 0:
            return mask
        inside = column < self.num_columns
        return inside if mask is None else mask & inside

    def spread(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """Activations in natural order, bfloat16, as `multiply` takes them.

        In NVFP4 the codes of one nibble are columns j, j + 4, j + 8, ... of a lane's 32: so must be the activations.
        """
        if self.weight_format == "bf16":
            return list(parts)
        return [self._every_fourth(parts, nibble) for nibble in range(4)]

    def _every_fourth(self, parts: Sequence[jax.Array], nibble: int) -> jax.Array:
        """[warps, 8, 4, 8]; in the single case the two parts' four values, times SINGLE_UNIT, twice: for either half of
        the words."""
        words = len(parts)
        if self.interpret:
            lane = jnp.stack(parts, axis=3).reshape(self.num_warps, *LANES, 2 * words, 4)[..., nibble]
            if not self.single:
                return lane
            lane = (lane.astype(jnp.float32) * SINGLE_UNIT).astype(jnp.bfloat16)
            return jnp.concatenate([lane, lane], axis=-1)
        half = "0x7632" if nibble % 2 else "0x5410"
        body = "".join(
            f"prmt.b32 ${word}, ${4 + 4 * word + nibble // 2}, ${6 + 4 * word + nibble // 2}, {half};"
            for word in range(words)
        )
        if self.single:  # 0x5F80 is 2**64
            body += "".join(f"mul.rn.bf16x2 ${w}, ${w}, u; mov.b32 ${w + 2}, ${w};" for w in range(2))
            body = f".reg .b32 u; mov.b32 u, 0x5F805F80; {body}"
        return _asm(f"{{ {body} }}", "=&r " * 4 + "r " * 4 * words, list(parts), jnp.bfloat16)

    # -- results ---------------------------------------------------------------------------------------------------

    def finish(self, accumulators: Sequence[jax.Array]) -> jax.Array:
        """The sums of several row groups over their warps, [*groups, *rows, n], all at once: one exchange through
        shared memory. n is their number, filled up to a power of two. Which element is what: `places`."""
        arrays = [self._within_lane(accumulator) for accumulator in accumulators]
        arrays += [jnp.zeros_like(arrays[0])] * (pl.next_power_of_2(len(arrays)) - len(arrays))
        stacked = _stacked(arrays)
        if self.single:
            stacked = stacked.sum(axis=2)  # over t
        if self.groups == 1:
            return stacked.sum(axis=0)
        return stacked.reshape(self.groups, -1, *stacked.shape[1:]).sum(axis=1)

    def _within_lane(self, accumulator: jax.Array) -> jax.Array:
        """Adds what a lane has twice: [warps, 8, 4, 2] in the single case, else [warps, 8, 4, 4]."""
        if self.single:
            return accumulator.reshape(self.num_warps, *LANES, 4, 2).sum(axis=3)
        return accumulator.reshape(self.num_warps, *LANES, 2, 4).sum(axis=3)

    def places(self, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """Of each element of a finished array, the row (counted from the first row group's first) and the token."""
        iota = [lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(len(shape))]
        if self.single:
            g, h, group = iota[-3:]
            return 16 * group + 8 * h + g, jnp.zeros(shape, jnp.int32)
        g, t, i, group = iota[-4:]
        return 16 * group + 8 * (i // 2) + g, 2 * t + i % 2


def of_pair(array: jax.Array, which: int) -> jax.Array:
    """One of the two halves of the last axis, [..., 2 * n] -> [..., n]."""
    parts = array.reshape(*array.shape[:-1], 2, -1)
    place = lax.broadcasted_iota(jnp.int32, parts.shape, parts.ndim - 2)
    return jnp.where(place == which, parts, 0.0).sum(axis=-2)


def _stacked(arrays: Sequence[jax.Array]) -> jax.Array:
    """Arrays side by side on a new last axis; a power of two of them, two at a time, as Triton joins them."""
    if len(arrays) == 1:
        return arrays[0][..., None]
    both = jnp.stack([_stacked(arrays[0::2])[..., :], _stacked(arrays[1::2])[..., :]], axis=-1)
    return both.reshape(*both.shape[:-2], len(arrays))


MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def _place_codes(register: str, scratch: str, word: str, nibble: int) -> str:
    """PTX: the given nibble of both 16-bit halves of a word, in the places of bfloat16: bits 8..6 take exponent and
    mantissa, bit 15 the sign."""
    exponent = ("shl.b32", 6), ("shl.b32", 2), ("shr.b32", 2), ("shr.b32", 6)
    sign = ("shl.b32", 12), ("shl.b32", 8), ("shl.b32", 4), ("shl.b32", 0)
    (up, by), (to_sign, far) = exponent[nibble], sign[nibble]
    return (
        f"{up} {register}, {word}, {by}; {to_sign} {scratch}, {word}, {far};"
        f" and.b32 {register}, {register}, 0x01C001C0; lop3.b32 {register}, {scratch}, 0x80008000, {register}, 0xEA;"
    )


def _e2m1(codes: jax.Array, nibble: int) -> jax.Array:
    """The values of one code of each 16-bit word, float32."""
    code = codes.astype(jnp.int32) >> (4 * nibble)
    exponent, half = (code >> 1 & 3).astype(jnp.float32), (code & 1) * 0.5
    value = jnp.where(exponent > 0, (1 + half) * 2.0 ** (exponent - 1), half)
    return jnp.where(code & 8, -value, value)


def _registers(first: int, count: int) -> str:
    return ", ".join(f"${first + i}" for i in range(count))


def _asm(text: str, constraints: str, args: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """Inline PTX over the 8 elements that each lane holds of every argument."""
    return plt.elementwise_inline_asm(
        text,
        args=args,
        constraints=",".join(constraints.split()),
        pack=8,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )[0]


def _masked_load(ref: Any, at: tuple, expert: Any, fits: Any) -> jax.Array:
    view = ref.at[at] if expert is None else ref.at[(expert, *at)]
    if fits is None:
        return plt.load(view)
    mask = jnp.broadcast_to(fits, jnp.broadcast_shapes(*(jnp.shape(i) for i in at)))
    return plt.load(view, mask=mask, other=jnp.zeros((), ref.dtype))
