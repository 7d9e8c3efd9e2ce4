"""Matrix tiles: the inline PTX against its plain twin, bit for bit, and the whole path of a GPU against the definition.

No GPU is needed: `ptx` runs the text. That a GPU's lanes hold what it supposes is read from the compiled kernels, in
the tests of the operations.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import inline_ptx, warp_tiles
from pallas_kernels.dense_gemv.reference import dequantized
from pallas_kernels.warp_tiles import ROW_GROUP, Matrix, Tiles
from tests.pallas_kernels import ptx

WARPS = [1, 2, 4]


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(warp_tiles.plt, "elementwise_inline_asm", ptx.inline_asm)


def tiles(num_warps=1, weight_format="nvfp4", num_tokens=2, **rest) -> tuple[Tiles, Tiles]:
    """As on a GPU, and as interpreted."""
    on_gpu = Tiles(2048, num_warps, weight_format, num_tokens, interpret=False, **rest)
    return on_gpu, dataclasses.replace(on_gpu, interpret=True)


def numbers(rng, shape, integers=False) -> jax.Array:
    """bfloat16 of many exponents; or integers whose sums of products float32 holds."""
    values = (
        rng.integers(-15, 16, shape) if integers else rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape)
    )
    return jnp.asarray(values.astype(ml_dtypes.bfloat16))


def assert_same_bits(got, want):
    got, want = (np.ascontiguousarray(x) for x in (got, want))
    assert got.dtype == want.dtype and np.isfinite(want).all()
    bits = f"u{got.itemsize}"
    np.testing.assert_array_equal(got.view(bits), want.view(bits))


def codes_and_scales(rng, nibble):
    """Every code of a nibble with every byte that a scale can be, random codes around it: 8 warps."""
    pair = np.arange(2048).reshape(8, 8, 4, 8)
    words = rng.integers(0, 2**16, pair.shape) & ~(15 << 4 * nibble) | pair % 16 << 4 * nibble
    return jnp.asarray(words.astype(np.uint16)), (pair // 16 % 127).astype(np.uint8)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_scale_bytes_are_their_values(num_tokens):
    """Each of the 127 bytes, four of them subnormal and one zero: exact, though bfloat16 carries some."""
    gpu, plain = tiles(2, num_tokens=num_tokens)
    scales = np.resize(np.arange(127, dtype=np.uint8), (2, 8, 4, 2))
    got = ptx.evaluate(gpu._block_scales, scales)
    assert_same_bits(got, plain._block_scales(jnp.asarray(scales)))
    unit = 1.0 if gpu.single else warp_tiles.SCALE_UNIT
    values = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64).repeat(4, axis=-1)
    np.testing.assert_array_equal(got.astype(np.float64), values * unit)


@pytest.mark.parametrize("nibble", range(4))
def test_decode_of_every_code_and_scale(nibble):
    gpu, plain = tiles(8)
    codes, bytes_ = codes_and_scales(np.random.default_rng(nibble), nibble)
    scales = (bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * 2.0**116).astype(ml_dtypes.bfloat16)
    got = gpu._decode(codes, jnp.asarray(scales), nibble)
    assert_same_bits(got, plain._decode(codes, jnp.asarray(scales), nibble))
    # And by the tables of the formats.
    code = (np.asarray(codes) >> 4 * nibble & 15).astype(np.uint8)
    value = code.astype(ml_dtypes.uint4).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    want = value * bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0**-10
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), want)


@pytest.mark.parametrize("num_warps", WARPS)
@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_activations_are_spread_to_their_codes(num_warps, num_tokens):
    """Part j of what a lane multiplies is every fourth of its 32 columns, from the j-th on."""
    gpu, plain = tiles(num_warps, num_tokens=num_tokens)
    rng = np.random.default_rng(num_warps)
    sets = [[numbers(rng, gpu.shape) for _ in range(4)] for _ in range(gpu.num_sets)]
    got, want = gpu.spread(sets), plain.spread(sets)
    unit = jnp.bfloat16(warp_tiles.SINGLE_UNIT if gpu.single else 1)
    for parts, spread, twins in zip(sets, got, want, strict=True):
        row = jnp.stack(parts, axis=3).reshape(num_warps, 8, 4, 32) * unit
        for nibble, (part, twin) in enumerate(zip(spread, twins, strict=True)):
            assert_same_bits(part, twin)
            assert_same_bits(part, row[..., nibble::4])


@pytest.mark.parametrize("num_warps", WARPS)
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_lanes_pass_on_what_they_hold(num_warps, num_tokens):
    gpu, plain = tiles(num_warps, num_tokens=num_tokens)
    values = numbers(np.random.default_rng(num_warps), gpu.shape)
    for place in range(4):
        assert_same_bits(gpu._from_place(values, place), plain._from_place(values, place))


def test_the_fence_is_empty():
    for which in tiles(2):
        assert_same_bits(which.fence(), np.zeros(which.shape, np.float32))


@pytest.mark.parametrize("right, wrong", [("setp.ne.u32", "setp.eq.u32"), ("t, -1;", f"t, {ptx.SMID};")])
def test_of_the_fence_nothing_is_left_without_its_barrier(right, wrong, monkeypatch):
    """The zeros are the barrier's result: with another one they are no numbers."""
    change_text(monkeypatch, right, wrong)
    [gpu, _] = tiles(2)
    assert np.isnan(gpu.fence()).all()


@pytest.mark.parametrize("num_warps", WARPS)
@pytest.mark.parametrize("integers", [True, False])
def test_mma_is_a_product_of_matrices(num_warps, integers):
    """Exact in integers; else but for the order of sums."""
    gpu, plain = tiles(num_warps, "bf16")
    rng = np.random.default_rng(num_warps)
    upper, lower, b = (numbers(rng, gpu.shape, integers) for _ in range(3))
    accumulator = numbers(rng, gpu.shape, integers).astype(jnp.float32)
    got, want = (which._mma(upper, lower, b, accumulator) for which in (gpu, plain))
    magnitude = None if integers else plain._mma(*map(jnp.abs, (upper, lower, b, accumulator)))
    assert_same_sums(got, want, magnitude)


@pytest.mark.parametrize("num_warps", WARPS)
@pytest.mark.parametrize("integers", [True, False])
def test_the_product_for_one_token(num_warps, integers):
    gpu, plain = tiles(num_warps, num_tokens=1)
    rng = np.random.default_rng(num_warps)
    codes = [jnp.asarray(rng.integers(0, 2**16, gpu.shape).astype(np.uint16)) for _ in range(2)]
    if integers:
        scales = [jnp.asarray(2.0 ** rng.integers(0, 4, (num_warps, 8, 4, 2))) for _ in range(2)]
    else:
        bytes_ = [jnp.asarray(rng.integers(0, 127, (num_warps, 8, 4, 2)).astype(np.uint8)) for _ in range(2)]
        scales = [plain._block_scales(part)[..., ::4] for part in bytes_]
    scales = [jnp.repeat(part.astype(jnp.float32), 4, axis=-1) for part in scales]
    own = plain.token() == 0  # the lanes that hold their piece's activations
    parts = [jnp.where(own, numbers(rng, gpu.shape, integers), 0) for _ in range(4)]
    accumulator = numbers(rng, gpu.shape, integers).astype(jnp.float32) * 2.0**-62
    [b], [twin], empty = gpu.spread([parts]), plain.spread([parts]), plain.fence()
    got = gpu._mma_single(*codes, scales, b, accumulator, empty)
    want = plain._mma_single(*codes, scales, twin, accumulator, empty)
    assert_same_sums(got, want, None if integers else absolute_single(plain, codes, scales, twin, accumulator))


def absolute_single(plain, codes, scales, b, accumulator):
    """The sums of absolute values."""
    codes = [part & 0x7777 for part in codes]
    return plain._mma_single(*codes, scales, [*map(jnp.abs, b)], jnp.abs(accumulator), plain.fence())


def assert_same_sums(got, want, magnitude):
    """Equal; or up to a rounding of each of the some twenty terms whose absolute sum is `magnitude`."""
    assert got.dtype == want.dtype == jnp.float32 and np.isfinite(want).all()
    assert np.count_nonzero(want) > 0.4 * want.size
    if magnitude is None:
        np.testing.assert_array_equal(got, want)
    else:
        assert (abs(np.asarray(got) - want) <= 20 * 2.0**-24 * magnitude).all()


# -- whole tiles ---------------------------------------------------------------------------------------------------


class Ref:
    """An array in memory, which `plt.load` reads by `load`: inside it, and where the mask says so."""

    def __init__(self, array):
        self.array, self.dtype, self.at = np.asarray(array), array.dtype, self

    def __getitem__(self, at):
        return self, np.broadcast_arrays(*(at if isinstance(at, tuple) else (at,)))


def load(view, *, mask=None, other=None, volatile=False):
    ref, at = view
    assert len(at) == ref.array.ndim
    mask = np.ones(at[0].shape, bool) if mask is None else np.broadcast_to(mask, at[0].shape)
    for index, size in zip(at, ref.array.shape, strict=True):
        assert ((index >= 0) & (index < size))[mask].all(), "a load outside of the array"
    read = ref.array[tuple(np.where(mask, index, 0) for index in at)]
    return jnp.asarray(read) if mask.all() else jnp.where(mask, read, other)


def draw_matrix(rng, shape, weight_format):
    """A `Matrix`, and its values in float64."""
    if weight_format == "bf16":
        weight = rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        return Matrix(jnp.asarray(weight)), weight.astype(np.float64)
    *lead, columns = shape
    codes = rng.integers(0, 2**16, (*lead, columns // 4)).astype(np.uint16)
    scales = rng.integers(8, 127, (*lead, columns // 16)).astype(np.uint8)  # XLA's CPU code keeps no subnormals
    return Matrix(jnp.asarray(codes), jnp.asarray(scales)), np.asarray(dequantized(codes, scales), np.float64)


def as_refs(matrix):
    return Matrix(*(None if leaf is None else Ref(leaf) for leaf in matrix))


def assert_product(got, want, magnitude):
    assert (abs(np.asarray(got, np.float64) - want) <= 2e-6 * magnitude).all()
    assert (want != 0).all()


def finished(which, sums):
    """[rows, tokens] (of each group of warps) from `Tiles.finish`; the rows of a power of two of row groups."""
    done = np.asarray(which.finish(sums)) * which.unit()
    row, token = (np.asarray(place) for place in which.places(done.shape))
    kept = token < which.num_tokens
    lead = (np.indices(done.shape)[0][kept],) if which.groups > 1 else ()
    shape = (which.groups, ROW_GROUP * done.shape[-1], which.num_tokens)
    out = np.full(shape[which.groups == 1 :], np.nan)
    out[(*lead, row[kept], token[kept])] = done[kept]
    return out


def multiplied(which, matrix, x, row_groups, num_rows=None, experts=None, slots=None):
    """Row groups from row 0 on, of all columns, times the tokens x: accumulators."""
    empty = which.fence()
    sums = [[empty] * which.num_sets] * row_groups
    for step in range(which.num_steps):
        activations = which.spread(which.load_tokens(Ref(x), step, slots))
        for group in range(row_groups):
            upper, lower = (which.load(matrix, step, 8 * group + half, num_rows, experts) for half in (0, 4))
            sums[group] = which.multiply(upper, lower, activations, sums[group], empty)
    return sums


@pytest.mark.parametrize("interpret", [False, True], ids=["ptx", "plain"])
@pytest.mark.parametrize(
    "weight_format, num_warps, num_tokens, columns",
    [
        ("nvfp4", 2, 1, 592),
        ("nvfp4", 1, 2, 336),
        ("nvfp4", 2, 4, 592),
        ("nvfp4", 4, 5, 400),
        ("nvfp4", 1, 8, 256),
        ("bf16", 4, 1, 264),
        ("bf16", 1, 2, 72),
        ("bf16", 2, 4, 200),
        ("bf16", 2, 5, 136),
        ("bf16", 4, 8, 256),
    ],
)
def test_tiles_are_a_product(weight_format, num_warps, num_tokens, columns, interpret, monkeypatch):
    """Three row groups, the last one cut off; columns that do not fill the last step, or do."""
    monkeypatch.setattr(warp_tiles.plt, "load", load)
    rng = np.random.default_rng(columns)
    which = Tiles(columns, num_warps, weight_format, num_tokens, interpret)
    matrix, weight = draw_matrix(rng, (21, columns), weight_format)
    x = numbers(rng, (num_tokens, columns))
    got = finished(which, multiplied(which, as_refs(matrix), x, 3, 21))
    x = np.asarray(x).astype(np.float64)
    assert_product(got[:21], weight @ x.T, abs(weight) @ abs(x).T)
    np.testing.assert_array_equal(got[21:], 0)


@pytest.mark.parametrize("interpret", [False, True], ids=["ptx", "plain"])
@pytest.mark.parametrize(
    "weight_format, num_tokens, columns", [("nvfp4", 1, 592), ("nvfp4", 3, 592), ("bf16", 3, 200), ("bf16", 6, 200)]
)
def test_groups_of_warps_have_an_expert_each(weight_format, num_tokens, columns, interpret, monkeypatch):
    """Two warps an expert, one group without any; two steps."""
    monkeypatch.setattr(warp_tiles.plt, "load", load)
    rng = np.random.default_rng(5)
    which = Tiles(columns, 8, weight_format, num_tokens, interpret, groups=4)
    stack, weight = draw_matrix(rng, (6, 8, columns), weight_format)
    x = numbers(rng, (4, num_tokens, columns))
    experts, slots = ([jnp.int32(i) for i in numbers] for numbers in ((5, 0, -1, 3), (2, 3, -1, 0)))
    got = finished(which, multiplied(which, as_refs(stack), x, 1, None, experts, slots))
    x = np.asarray(x).astype(np.float64)
    for group, (expert, slot) in enumerate(zip(experts, slots, strict=True)):
        if expert < 0:
            np.testing.assert_array_equal(got[group], 0)
        else:
            w, a = weight[int(expert)], x[int(slot)].T
            assert_product(got[group], w @ a, abs(w) @ abs(a))


def assert_same_arrays(got, want):
    """Trees of arrays, bit for bit."""
    got, want = (jax.tree.flatten(tree) for tree in (got, want))
    assert got[1] == want[1]
    for a, b in zip(got[0], want[0], strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("first_warp", [1, 3, -2])
@pytest.mark.parametrize("weight_format, num_tokens", [("nvfp4", 1), ("nvfp4", 3), ("bf16", 1), ("bf16", 6)])
def test_columns_begin_at_a_warp(weight_format, num_tokens, first_warp, monkeypatch):
    """As if there were columns of zeros for the warps before it; or, where it is negative, as if the columns were not
    there that an earlier pass had."""
    monkeypatch.setattr(warp_tiles.plt, "load", load)
    line = 256 if weight_format == "nvfp4" else 64
    shift, columns = first_warp * line, 2 * line + line // 4 + 16

    def moved(row, packed=1):
        """A row that holds `packed` columns an element."""
        by = shift // packed
        before = [(0, 0)] * (row.ndim - 1)
        return jnp.pad(row, [*before, (by, 0)]) if by > 0 else row[..., -by:]

    rng = np.random.default_rng(3)
    matrix, _ = draw_matrix(rng, (9, columns), weight_format)
    x = numbers(rng, (num_tokens, columns))
    which = Tiles(columns, 4, weight_format, num_tokens, interpret=True, first_warp=first_warp)
    same = dataclasses.replace(which, num_columns=columns + shift, first_warp=0)
    columns_of = [1] if weight_format == "bf16" else [4, 16]
    moved_matrix = Matrix(*(moved(leaf, packed) for leaf, packed in zip(matrix, columns_of, strict=False)))
    for step in range(same.num_steps):
        for row in (0, 8):
            got = which.load(as_refs(matrix), step, row, 9)
            assert_same_arrays(got, same.load(as_refs(moved_matrix), step, row, 9))
        assert_same_arrays(which.load_tokens(Ref(x), step), same.load_tokens(Ref(moved(x)), step))
        assert_same_arrays(which.load_columns(Ref(x[0]), step), same.load_columns(Ref(moved(x[0])), step))


@pytest.mark.parametrize("weight_format, num_tokens", [("nvfp4", 1), ("bf16", 8)])
def test_one_of_a_stack_is_read(weight_format, num_tokens, monkeypatch):
    monkeypatch.setattr(warp_tiles.plt, "load", load)
    [_, which] = tiles(4, weight_format, num_tokens)
    rng, index = np.random.default_rng(0), jnp.int32(2)
    stack, _ = draw_matrix(rng, (3, 4, 2048), weight_format)
    x = numbers(rng, (3, num_tokens, 2048))
    one = jax.tree.map(lambda leaf: leaf[2], stack)
    assert_same_arrays(which.load(as_refs(stack), 1, 0, None, index), which.load(as_refs(one), 1, 0))
    assert_same_arrays(which.load_tokens(Ref(x), 1, index), which.load_tokens(Ref(x[2]), 1))


@pytest.mark.parametrize(
    "weight_format, num_warps, columns",
    [("nvfp4", 8, 2000), ("nvfp4", 1, 208), ("bf16", 8, 1992), ("bf16", 4, 712), ("bf16", 1, 56)],
)
def test_a_row_is_shared_as_it_would_be_loaded(weight_format, num_warps, columns, monkeypatch):
    monkeypatch.setattr(warp_tiles.plt, "load", load)
    x = numbers(np.random.default_rng(0), (1, columns))
    for which in tiles(num_warps, weight_format, 1):
        which = dataclasses.replace(which, num_columns=columns)
        assert which.lanes_hold_a_row
        column, inside = which.row_places()
        row = load(Ref(x)[column * 0, column], mask=inside, other=jnp.zeros((), x.dtype))
        for step in range(which.num_steps):
            assert_same_arrays(which.share_row(row, step), which.load_tokens(Ref(x), step))


@pytest.mark.parametrize("weight_format, num_tokens", [("nvfp4", 1), ("bf16", 1), ("nvfp4", 3), ("bf16", 8)])
def test_sums_are_of_the_lanes_of_a_token(weight_format, num_tokens):
    """And each of these has them."""
    [_, which] = tiles(4, weight_format, num_tokens)
    token = np.asarray(which.token())
    own = token < num_tokens
    x = jnp.where(own, numbers(np.random.default_rng(0), which.shape, integers=True).astype(jnp.float32), 0)
    got = np.broadcast_to(which.sum_by_token(x), which.shape)
    want = np.bincount(token.ravel(), weights=np.ravel(x))[token]
    assert set(token[own]) == set(range(num_tokens))
    np.testing.assert_array_equal(got[own], want[own])


# -- that all this can fail ----------------------------------------------------------------------------------------

NUMBERS = numbers(np.random.default_rng(7), (1, 8, 4, 8))
CODES = jnp.asarray(np.random.default_rng(8).integers(0, 2**16, (1, 8, 4, 8)).astype(np.uint16))
SCALES = jnp.full((1, 8, 4, 8), 2.0)
ONES = jnp.ones((1, 8, 4, 8))
OPERATIONS = {
    "decode": lambda t: t._decode(CODES, jnp.full(CODES.shape, 2.0**116, jnp.bfloat16), 1),
    "mma": lambda t: t._mma(NUMBERS, -NUMBERS, NUMBERS[:, ::-1], ONES),
    "spread": lambda t: t._every_fourth([NUMBERS, -NUMBERS, 2 * NUMBERS, 3 * NUMBERS], 2),
    "from_place": lambda t: t._from_place(NUMBERS, 3),
    "mma_single": lambda t: t._mma_single(
        CODES, CODES + 1, [SCALES, 3 * SCALES], [NUMBERS * i for i in range(1, 5)], 0 * ONES, 0 * ONES
    ),
}


def change_text(monkeypatch, right, wrong):
    """All inline PTX, which must have what is wrong now."""

    def changed(text, **how):
        assert right in text
        return ptx.inline_asm(text.replace(right, wrong), **how)

    monkeypatch.setattr(warp_tiles.plt, "elementwise_inline_asm", changed)


@pytest.mark.parametrize(
    "operation, num_tokens, right, wrong",
    [
        ("decode", 2, "shl.b32 e, $4, 2", "shl.b32 e, $4, 1"),
        ("decode", 2, "0x80008000", "0x00008000"),
        ("decode", 2, "0xEA", "0xE8"),
        ("mma", 2, "{$8, $12, $9, $13}", "{$8, $9, $12, $13}"),
        ("mma", 2, "{$16, $17}", "{$17, $16}"),
        ("spread", 2, "$5, $7", "$7, $5"),
        ("spread", 2, "0x5410", "0x7632"),
        ("spread", 1, "0x5F805F80", "0x5F805F00"),
        ("from_place", 2, "and.b32 t, l, 7", "and.b32 t, l, 3"),
        ("from_place", 2, "add.u32 t, t, 24", "add.u32 t, t, 16"),
        ("from_place", 1, "shr.u32 u, l, 3", "shr.u32 u, l, 2"),
        ("from_place", 1, "setp.eq.u32", "setp.ne.u32"),
        ("mma_single", 1, "and.b32 t, t, 4", "and.b32 t, t, 8"),
        ("mma_single", 1, "selp.f32 c00, c03, c02, p", "selp.f32 c00, c01, c00, p"),
        ("mma_single", 1, "fma.rn.f32 $1, c00, $40", "fma.rn.f32 $1, c00, $32"),
        ("mma_single", 1, "{$20, $21}", "{$16, $17}"),
    ],
)
def test_a_wrong_text_gives_something_else(operation, num_tokens, right, wrong, monkeypatch):
    [gpu, _], run = tiles(num_tokens=num_tokens), OPERATIONS[operation]
    want = np.asarray(run(gpu))
    change_text(monkeypatch, right, wrong)
    assert (np.asarray(run(gpu)) != want).mean() > 0.05


def test_the_sums_of_one_token_begin_at_the_fence():
    """So that no product is there before: were its zeros no numbers, neither were the sums."""
    [gpu, _] = tiles(num_tokens=1)
    sums = gpu._mma_single(CODES, CODES, [SCALES] * 2, [NUMBERS] * 4, 0 * ONES, jnp.nan * ONES)
    assert np.isnan(sums[..., :4]).all()


@pytest.mark.parametrize(
    "text, error",
    [
        ("{ mad.lo.u32 $0, $4, $5, $6; }", KeyError),  # not known
        ("{ mov.b32 $0, $1; }", KeyError),  # not written yet
        ("{ mov.b32 $0, $4; }", KeyError),  # outputs left out
        ("{ mov.b32 $4, $5; }", AssertionError),  # an input
        ("{ mov.b32 a, $5; }", AssertionError),  # not declared
        ("{ shl.b32 $0, $4, 32; }", AssertionError),
        ("{ and.b32 $0, $4; }", AssertionError),
        ("{ .reg .pred p; mov.b32 p, $4; }", AssertionError),
        ("{ setp.eq.u32 $0, $4, 0; }", AssertionError),
        ("{ selp.b32 $0, $4, $5, $6; }", AssertionError),
        ("{ .reg .pred p; bar.red.or.pred p, 0, $4; }", AssertionError),
        ("{ @p mov.b32 $0, $4; }", KeyError),
        ("mov.b32 $0, $4;", AssertionError),
    ],
)
def test_what_no_assembler_takes_is_refused(text, error):
    with pytest.raises(error):
        inline_ptx.asm(text, "=&r " * 4 + "r " * 4, [NUMBERS], jnp.bfloat16)
