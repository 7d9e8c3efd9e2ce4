"""Random matrices in both formats, how far results may lie apart, and what is read from a compiled kernel."""

from __future__ import annotations

import os
import re
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.warp_tiles import BARRIER, MMA, Matrix


def draw_matrix(rng, shape, weight_format) -> Matrix:
    """[*experts, out, in], of which every scale byte up to 4.5 may be one, subnormals and zero too."""
    *lead, rows, columns = shape
    if weight_format == "bf16":
        return Matrix(draw(rng, shape))
    return Matrix(
        jnp.asarray(rng.integers(0, 2**16, (*lead, rows, columns // 4)).astype(np.uint16)),
        jnp.asarray(rng.integers(0, 74, (*lead, rows, columns // 16)).astype(np.uint8)),
        jnp.asarray((0.02 * rng.uniform(0.5, 2, lead)).astype(np.float32)),
    )


def draw(rng, shape, scale=1.0, dtype=ml_dtypes.bfloat16):
    return jnp.asarray((scale * rng.standard_normal(shape)).astype(dtype))


def like_matrix(shape, weight_format) -> Matrix:
    """The same, abstract."""
    *lead, rows, columns = shape
    if weight_format == "bf16":
        return Matrix(like(shape))
    return Matrix(
        like((*lead, rows, columns // 4), jnp.uint16),
        like((*lead, rows, columns // 16), jnp.uint8),
        like(tuple(lead), jnp.float32),
    )


def like(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def assert_close(got, want, steps=1, magnitude=0.0):
    """Two results of which the float32 sums ran in another order.

    Unrounded, 1e-6 of their norm. In bfloat16 one element in 50 (or one at all) may lie `steps` of bfloat16 apart: a
    step a rounding that may go the other way. They are steps of the result, or of an operand's `magnitude`.
    """
    assert got.dtype == want.dtype and got.shape == want.shape
    a, b = (np.asarray(x).astype(np.float64) for x in (got, want))
    assert np.isfinite(a).all() and np.isfinite(b).all()
    if got.dtype == jnp.float32:
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)
        return
    assert (a != b).sum() <= max(1, a.size / 50), f"{(a != b).mean():.2%} differ"
    _, exponent = np.frexp(np.maximum(np.maximum(abs(a), abs(b)), np.asarray(magnitude, np.float64)))
    assert (abs(a - b) <= steps * 2.0 ** (exponent - 8.0)).all()


def with_layouts(compiled, *args, **options):
    """The report of `compiled` with TTGIR."""
    # Else LLVM names the functions of a stack trace with every pass that it prints: seconds a kernel.
    with mock.patch.dict(os.environ, LLVM_DISABLE_SYMBOLIZATION="1"):
        return compiled(*args, ttgir=True, **options)


def assert_well_compiled(report, names, without_matrices=(), wide=True):
    """These launches and no other; without spills or copies; subnormals kept; nothing read before the kernel before has
    written. But for the kernels `without_matrices`: products on the matrix units; of what is read, three quarters by 16
    bytes a lane at least, if `wide`: all weights, for each 16 bytes of which there are 2 of scales."""
    assert dict(report.names) == names and report.kernels == sum(names.values())
    assert (report.copies, report.spills, report.local_memory) == (0, 0, 0)
    for name, code in report.code.items():
        assert "griddepcontrol.wait" in code.ptx
        assert not re.search(r"\b(mul|add|fma|cvt)\S*\.ftz", code.ptx)
        if name in without_matrices:
            continue
        assert MMA in code.ptx
        loads = loads_of(code.ptx)
        assert loads.count(128)
        assert not wide or 128 * loads.count(128) > 0.75 * sum(loads)
        assert_lanes_hold_tiles(report.ttgir[name])


def loads_of(ptx):
    """Every load from memory: its bits a lane."""
    found = re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", ptx)
    assert len(found) == ptx.count("ld.global")
    return [int(n or 1) * int(bits) for n, bits in found]


def assert_loads_come_first(ptx):
    """All that is read 16 bytes a lane is asked for before the one fence, and this comes before all products. Each sum
    begins with what the fence gives, so that ptxas keeps that order."""
    assert ptx.count(BARRIER) == 1
    before, _, rest = ptx.partition(BARRIER)
    fence, _, after = rest.partition("}")
    assert 128 in loads_of(before) and 128 not in loads_of(after) and MMA not in before
    sums, begun = set(), set(re.findall(r"mov\.f32 c\d+, (%\w+)", after))
    for total, accumulator in re.findall(rf"{re.escape(MMA)} {{(.*?)}}, {{.*?}}, {{.*?}}, {{(.*?)}};", after):
        sums |= set(total.split(", "))
        begun |= set(accumulator.split(", "))
    assert begun - sums and begun - sums <= set(re.findall(r"%\w+", fence))


def assert_lanes_hold_tiles(ttgir):
    """What inline PTX relies on: a warp a slice, lanes in C order, the last axis in a lane's registers.

    Triton may leave out the axis of one warp; and the fence, a number that all lanes share, need not be a tensor.
    """
    [num_warps] = map(int, re.findall(r'"ttg.num-warps" = (\d+)', ttgir))
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<(.*)>$", ttgir, re.MULTILINE))
    tiles = {f"{num_warps}x8x4x8": tile_layout(num_warps)}
    if num_warps == 1:
        tiles["8x4x8"] = tile_layout()
    found = re.findall(r"tt\.elementwise_inline_asm(.*)packed_element = (\d+).*?> : (\(.*?\) -> \S+ \S+)", ttgir)
    assert found
    for text, packed, types in found:
        assert packed == "8"
        if BARRIER in text and types.startswith("(f32) -> f32 "):
            continue
        tensors = re.findall(r"tensor<([\dx]+)x\w+, (#\w+)>", types)
        assert len(tensors) == types.count("tensor") > 1
        for shape, layout in tensors:
            assert layouts[layout] == tiles[shape]


def tile_layout(*warps):
    ones = [1 for _ in warps]
    return (
        f"{{sizePerThread = {[*ones, 1, 1, 8]}, threadsPerWarp = {[*ones, 8, 4, 1]}, "
        f"warpsPerCTA = {[*warps, 1, 1, 1]}, order = {[*reversed(range(3 + len(warps)))]}}}"
    )
