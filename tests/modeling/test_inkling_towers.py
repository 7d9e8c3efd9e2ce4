"""Inkling's towers against an independent numpy model: fold order, rounding, sizes from the checkpoint, batches."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inkling_oracle import TowerOracle, bf
from tiny import relative
from tiny_inkling import VISION_LINEARS, tiny_inkling

from modeling.errors import CheckpointError
from modeling.inkling import media
from modeling.inkling.config import VisionConfig
from modeling.inkling.media import embed_media, in_batches, tower_rows
from modeling.inkling.towers import VisionTower, fold, folds_of, published_linears
from modeling.parameters import parameter_names

FOLDS = ((1, 2), (1, 2), (2, 1))  # of 2 x 4 x 4 pixels
RNG = np.random.default_rng(0)
PATCHES = bf(RNG.standard_normal((40, 2, 4, 4, 3)) * 1.5)
FRAMES = RNG.integers(0, 4, (40, 8))


@functools.cache
def tiny(dtype):
    """The model, and its parameters as float64."""
    one_layer: dict[str, Any] = dict(num_hidden_layers=1, layer_types=("full_attention",), sparse_layers=(False,))
    model = tiny_inkling(dtype=dtype, num_mtp_layers=0, towers=True, **one_layer)
    leaves = zip(parameter_names(model), jax.tree.leaves(model), strict=True)
    return model, {name: np.asarray(leaf.astype(jnp.float32), np.float64) for name, leaf in leaves}


@functools.cache
def ours(kind, dtype):
    rows = PATCHES.astype(np.float32) if kind == "image" else FRAMES.astype(np.uint8)
    return embed_media(tiny(dtype)[0], kind, rows).astype(np.float64)


def theirs(kind, dtype, wrong=""):
    model, params = tiny(dtype)
    oracle = TowerOracle(model.config, params, wrong, dtype == jnp.bfloat16)
    if kind == "image":
        return np.stack([oracle.picture(patch, FOLDS) for patch in PATCHES])
    return np.stack([oracle.sound(frame) for frame in FRAMES])


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_float32_towers_equal_the_oracle(kind):
    assert relative(ours(kind, jnp.float32), theirs(kind, jnp.float32)) < 1e-6


@pytest.mark.parametrize("mistake", TowerOracle.MISTAKES)
def test_each_wrong_rule_would_be_noticed(mistake):
    assert relative(ours("image", jnp.float32), theirs("image", jnp.float32, mistake)) > 5e-5


def differing(kind, wrong=""):
    """Share of bfloat16 output values that are not bit-equal to the oracle's."""
    return float((ours(kind, jnp.bfloat16) != theirs(kind, jnp.bfloat16, wrong)).mean())


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_bfloat16_towers_equal_the_oracle_but_for_sums_that_fall_on_a_rounding_edge(kind):
    assert differing(kind) < 0.01


@pytest.mark.parametrize("mistake", TowerOracle.ROUNDING_MISTAKES)
def test_each_wrong_rounding_would_be_noticed(mistake):
    assert max(differing(kind, mistake) for kind in ("image", "audio")) > 0.1


def test_a_block_moves_into_channels_by_time_then_row_then_column():
    """Every value says where it came from: time, row, column, channel."""
    at = np.stack(np.meshgrid(*map(np.arange, (2, 4, 6, 3)), indexing="ij"), -1)
    folded = np.asarray(fold(jnp.asarray(at.reshape(1, 2, 4, 6, -1)), 2, 2)).reshape(1, 2, 3, 2, 2, 2, 3, 4)
    for y, x, time, row, column, channel in np.ndindex(2, 3, 2, 2, 2, 3):
        expected = [time, 2 * y + row, 2 * x + column, channel]
        assert folded[0, y, x, time, row, column, channel].tolist() == expected


@pytest.mark.parametrize(
    "config, linears, folds",
    [
        (VisionConfig(), published_linears(6144), ((1, 5), (1, 2), (1, 4), (2, 1))),
        (VisionConfig(), published_linears(4096), ((1, 5), (1, 2), (1, 4), (2, 1))),
        (VisionConfig(8), ((64, 12), (64, 256), (256, 256), (64, 512)), ((1, 2), (1, 2), (1, 2), (2, 1))),
        (VisionConfig(4, num_layers=3), VISION_LINEARS, FOLDS),
        (VisionConfig(16, num_layers=2), ((64, 48), (32, 2048)), ((1, 4), (2, 4))),  # space and time together
        (VisionConfig(4, 1, num_layers=1), ((32, 48),), ((1, 4),)),
        (VisionConfig(4, 2, 1, 2), ((7, 16), (32, 14)), ((1, 4), (2, 1))),
    ],
)
def test_sizes_of_layers_tell_how_far_they_fold(config, linears, folds):
    assert folds_of(config, linears) == folds


@pytest.mark.parametrize(
    "patch_size, linears, words",
    [
        (4, ((32, 13), (64, 128), (32, 128)), "layer 0 takes 13 features"),  # no multiple of the channels
        (4, ((32, 6), (64, 128), (32, 128)), "layer 0 takes 6 features"),  # two positions are no square
        (4, ((32, 12), (64, 128), (32, 64)), "layer 2 takes 64 features"),  # time left over
        (4, ((32, 12), (64, 32), (32, 128)), "leaves 2 x 2 positions"),
        (4, ((32, 27), (64, 128), (32, 128)), "layer 0 takes 27 features"),  # 3 x 3 does not divide 4 x 4
        (40, published_linears(64)[::-1], "layer 0 takes 9600 features"),
        (20, published_linears(64), "layer 2 takes 5120 features"),
        (80, published_linears(64), "leaves 2 x 2 positions"),
        (4, ((0, 12), (64, 128), (32, 128)), "layer 1 takes 128 features"),  # of no channels
    ],
)
def test_layers_that_do_not_fold_a_patch_into_one_vector_are_refused(patch_size, linears, words):
    with pytest.raises(CheckpointError, match=words):
        folds_of(VisionConfig(patch_size), linears)


def test_the_published_tower_takes_40_pixels_to_one_vector():
    tower = nnx.eval_shape(lambda: VisionTower(VisionConfig(), published_linears(6144), 1e-6))
    assert [norm.weight.shape for norm in tower.norms] == [(128,), (320,), (4800,)]
    patches = jax.ShapeDtypeStruct((5, *tower.row), jnp.bfloat16)
    assert tower.row == (2, 40, 40, 3)
    out = jax.eval_shape(lambda tower, patches: tower(patches), tower, patches)
    assert (out.shape, out.dtype) == ((5, 6144), jnp.bfloat16)


@pytest.mark.parametrize("kind", ["image", "audio"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_is_the_same_in_any_batch(kind, dtype):
    """Alone among padding, in a batch of either size, and cut anywhere; but for the order of sums."""
    model = tiny(dtype)[0]
    rows = PATCHES.astype(np.float32) if kind == "image" else FRAMES.astype(np.uint8)
    bound, truth = 1e-6 if dtype == jnp.float32 else 2e-3, ours(kind, dtype)
    for count in (1, 7, 32, 33):
        assert relative(embed_media(model, kind, rows[:count]), truth[:count]) < bound
    many = embed_media(model, kind, np.concatenate([rows] * 13))  # 520: a batch of 512 and one of 32
    assert relative(many, np.concatenate([truth] * 13)) < bound


@pytest.mark.parametrize("count", [1, 31, 32, 33, 512, 513, 1100])
def test_batches_have_few_sizes_and_lose_nothing(count):
    sizes = []

    def run(part):
        sizes.append(len(part))
        return jnp.asarray(part * 2)

    rows = np.arange(count * 3.0).reshape(count, 3)
    np.testing.assert_array_equal(in_batches(rows, run), rows * 2)
    assert set(sizes) <= set(media.BATCHES)
    assert sum(sizes) - count < media.BATCHES[-1]


def test_each_band_has_bins_of_its_own():
    """A frame's vector depends on the rows of the table that its bands and their bins name, and on no other."""
    tower, frame = tiny(jnp.float32)[0].audio, jnp.asarray(FRAMES[:1])
    gradient = jax.grad(lambda tower: tower(frame, jnp.float32)[0, 0])(tower).encoder.weight[...]
    used = np.asarray(gradient != 0).any(1).reshape(8, 4)  # band, bin
    np.testing.assert_array_equal(used, FRAMES[0][:, None] == np.arange(4))


def test_rows_have_the_shapes_that_the_towers_take():
    assert tower_rows(tiny(jnp.float32)[0]) == {"image": (2, 4, 4, 3), "audio": (8,)}
    assert tower_rows(tiny_inkling(num_mtp_layers=0)) == {}
