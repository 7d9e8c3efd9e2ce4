"""The two published Inklings, evaluated abstractly: parameters of every part, tensors and bytes on disk."""

from __future__ import annotations

import functools
import math
import re

import jax
import pytest

from modeling.inkling import names
from modeling.inkling.config import FULL, INKLING_SMALL, InklingConfig
from modeling.inkling.model import Inkling
from modeling.inkling.towers import published_linears
from modeling.parameters import parameter_names

PUBLISHED = {"inkling": InklingConfig(), "small": INKLING_SMALL}

# Parameters (spec section 2.5), counted from the released files.
PARTS = {
    "inkling": {
        "embed": 1_235_091_456,
        "unembed": 1_235_091_456,
        "attention, sliding": 7_267_082_240,
        "attention, full": 1_315_094_528,
        "dense MLP": 905_969_666,
        "router": 101_466_176,
        "shared experts": 7_247_757_312,
        "routed experts": 927_712_935_936,
        "sconv": 4_235_264,
        "norms": 840_192,
        "mtp": 5_260_445_704,
        "audio": 7_870_464,
        "vision": 83_743_232,
    },
    "small": {
        "embed": 823_394_304,
        "unembed": 823_394_304,
        "attention, sliding": 1_541_693_440,
        "attention, full": 308_396_032,
        "dense MLP": 402_653_186,
        "router": 42_281_000,
        "shared experts": 2_013_265_920,
        "routed experts": 257_698_037_760,
        "sconv": 1_720_320,
        "norms": 363_008,
        "mtp": 2_231_912_456,
        "audio": 5_246_976,
        "vision": 64_080_384,
    },
}


@functools.cache
def shapes(size: str, nvfp4: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """Leaves of the whole model by name."""
    config = PUBLISHED[size]
    formats = tuple("nvfp4" if nvfp4 and i > 2 else "bf16" for i in range(config.num_hidden_layers))
    model = Inkling.abstract(
        config, expert_formats=formats, num_mtp_layers=8, vision=published_linears(config.hidden_size), audio=True
    )
    return dict(zip(parameter_names(model), jax.tree.leaves(model), strict=True))


def part(name: str, config: InklingConfig) -> str:
    """The row of the table that a leaf counts towards."""
    top = name.split(".")[0]
    if top in ("mtp", "audio", "vision", "embed", "unembed"):
        return top
    if "norm" in name:
        return "norms"
    if "sconv" in name:
        return "sconv"
    layer = int(name.split(".")[1])
    if ".attn." in name:
        return "attention, full" if config.layer_types[layer] == FULL else "attention, sliding"
    if ".experts." in name:
        return "routed experts"
    if ".shared_experts." in name:
        return "shared experts"
    return "router" if config.sparse_layers[layer] else "dense MLP"


@pytest.mark.parametrize("size", PUBLISHED)
def test_parameters_of_every_part(size):
    counts = dict.fromkeys(PARTS[size], 0)
    for name, leaf in shapes(size).items():
        counts[part(name, PUBLISHED[size])] += leaf.size
    assert counts == PARTS[size]


def tensors_on_disk(size: str, nvfp4: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model is read from, and its shape."""
    return {
        piece.tensor: piece.shape
        for name, leaf in shapes(size, nvfp4).items()
        for piece in names.on_disk(name, leaf.shape, {}).pieces
    }


@pytest.mark.parametrize(
    "size, nvfp4, tensors",
    [("inkling", False, 1552), ("inkling", True, 2056), ("small", False, 1048), ("small", True, 1360)],
)
def test_tensors_on_disk(size, nvfp4, tensors):
    """An activation range and an unpacked shape a packed stack are there too, and not read."""
    packed = [name for name in tensors_on_disk(size, nvfp4) if name.endswith(".scale2")]
    assert len(tensors_on_disk(size, nvfp4)) + 2 * len(packed) == tensors


@pytest.mark.parametrize("size, total", [("inkling", 592_005_369_312), ("small", 170_733_074_592)])
def test_bytes_of_the_nvfp4_releases(size, total):
    """The published totals, less what is not read and the scales that gate and up hold twice in memory."""
    leaves = shapes(size, nvfp4=True)
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
    twice = sum(leaf.size * 4 for name, leaf in leaves.items() if name.endswith("experts.up_proj.global_scale"))
    stacks = sum(name.endswith(".scale2") for name in tensors_on_disk(size, True))
    assert held - twice + stacks * (2 + 3 * 8) == total


@pytest.mark.parametrize(
    "name, inkling, small",
    [
        ("layers.0.attn.wq_du.weight", (8192, 6144), (4096, 4096)),
        ("layers.0.attn.wk_dv.weight", (2048, 6144), (1024, 4096)),
        ("layers.5.attn.wv_dv.weight", (1024, 6144), (1024, 4096)),
        ("layers.5.attn.wr_du.weight", (1024, 6144), (512, 4096)),
        ("layers.5.attn.wo_ud.weight", (6144, 8192), (4096, 4096)),
        ("layers.4.attn.rel_logits_proj.proj", (16, 512), (16, 512)),
        ("layers.5.attn.rel_logits_proj.proj", (16, 1024), (16, 1024)),
        ("layers.4.attn.k_sconv.weight", (2048, 1, 4), (1024, 1, 4)),
        ("layers.1.mlp.w13_dn.weight", (49152, 6144), (32768, 4096)),
        ("layers.1.mlp.w2_md.weight", (6144, 24576), (4096, 16384)),
        ("layers.2.mlp.experts.w13_weight", (256, 6144, 6144), (256, 4096, 4096)),
        ("layers.3.mlp.experts.w13_weight", (256, 6144, 3072), (256, 4096, 2048)),
        ("layers.3.mlp.experts.w13_weight.scale", (256, 6144, 384), (256, 4096, 256)),
        ("layers.3.mlp.experts.w2_weight", (256, 6144, 1536), (256, 4096, 1024)),
        ("layers.3.mlp.experts.w2_weight.scale", (256, 6144, 192), (256, 4096, 128)),
        ("layers.3.mlp.shared_experts.shared_w13_weight", (2, 6144, 6144), (2, 4096, 4096)),
    ],
)
def test_shapes_on_disk(name, inkling, small):
    assert tensors_on_disk("inkling", True)[f"model.llm.{name}"] == inkling
    assert tensors_on_disk("small", True)[f"model.llm.{name}"] == small


def test_a_depth_has_twenty_tensors():
    depths = [name for name in tensors_on_disk("small", True) if name.startswith("model.mtp.")]
    assert len(depths) == 160
    assert {re.split(r"\.(\d+)\.", name)[1] for name in depths} == set("01234567")
