"""Logical axes to meshes: what is split, and what is refused."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from modeling.flint import names
from modeling.flint.config import FlintConfig
from modeling.flint.model import Flint
from modeling.inkling import names as inkling_names
from modeling.inkling.config import INKLING_SMALL, InklingConfig
from modeling.inkling.model import Inkling
from modeling.parameters import parameter_names
from sharding.rules import PRESETS, ShardingError, check_dimensions, mesh_shardings


class Device:
    """Stands in for one device of a mesh larger than this machine."""

    platform, device_kind, process_index, client = "cpu", "cpu", 0, None

    def __init__(self, id: int):
        self.id = id


def mesh(*shape: int, axes: tuple[str, ...] = ("tp",)) -> Mesh:
    devices = np.array([Device(i) for i in range(math.prod(shape))], object)
    return Mesh(devices.reshape(shape), axes)


def arrays(config: FlintConfig, weight_format: str = "bf16"):
    model = Flint.abstract(config, weight_format=weight_format)
    leaves = zip(parameter_names(model), jax.tree.leaves(model), strict=True)
    return {name: (names.logical_axes(name, leaf.ndim), leaf.shape) for name, leaf in leaves}


def test_nothing_large_is_replicated():
    """Published sizes on 4 devices: each holds a quarter of everything but norms, routers and global scales."""
    for weight_format in ("bf16", "nvfp4"):
        table = arrays(FlintConfig(), weight_format)
        shardings = mesh_shardings(mesh(4), PRESETS["tp"], table)
        whole = [name for name, s in shardings.items() if "tp" not in s.spec]
        small = ("norm.weight", "mlp.gate", "global_scale")
        assert all(name.endswith(small) for name in whole)
        assert sum(np.prod(table[name][1]) for name in whole) < 0.001 * 40e9


def inkling_arrays(config: InklingConfig, depths: int = 0, formats: tuple[str, ...] | None = None):
    model = Inkling.abstract(config, num_mtp_layers=depths, expert_formats=formats)
    leaves = zip(parameter_names(model), jax.tree.leaves(model), strict=True)
    return {name: (inkling_names.logical_axes(name, leaf.ndim), leaf.shape) for name, leaf in leaves}


@pytest.mark.parametrize("config", [InklingConfig(), INKLING_SMALL], ids=["inkling", "small"])
def test_inklings_large_leaves_are_split(config):
    """On 8 devices; whole are what every device needs whole, and the depths' input projections."""
    formats = ("bf16",) * 3 + ("nvfp4",) * (config.num_hidden_layers - 3)
    table = inkling_arrays(config, 8, formats)
    shardings = mesh_shardings(mesh(8), PRESETS["tp"], table)
    check_dimensions(mesh(8), PRESETS["tp"], inkling_names.dimensions(config))
    whole = [name for name, s in shardings.items() if "tp" not in s.spec]
    small = ("norm.weight", "mlp.gate", "_bias", "_scale", "rel_proj", "attn_sconv.weight", "mlp_sconv.weight")
    assert all(name.endswith((*small, "input_proj.weight")) for name in whole)
    assert sum(np.prod(table[name][1]) for name in whole if name.endswith(small)) < 0.001 * 276e9


def test_inklings_specs():
    config = InklingConfig(num_hidden_layers=4)
    table = inkling_arrays(config, 1, ("bf16", "bf16", "bf16", "nvfp4"))
    specs = {name: s.spec for name, s in mesh_shardings(mesh(4), PRESETS["tp"], table).items()}
    assert specs["embed.weight"] == specs["unembed.weight"] == PartitionSpec("tp", None)
    for projection in ("q", "k", "v", "r"):
        assert specs[f"layers.0.attn.{projection}_proj.weight"] == PartitionSpec("tp", None)
    assert specs["layers.0.attn.o_proj.weight"] == PartitionSpec(None, "tp")
    assert specs["layers.0.attn.k_sconv.weight"] == specs["layers.0.attn.v_sconv.weight"] == PartitionSpec("tp", None)
    assert specs["layers.0.attn_sconv.weight"] == specs["layers.0.mlp_sconv.weight"] == PartitionSpec(None, None)
    assert specs["layers.0.attn.rel_proj"] == specs["layers.2.mlp.gate"] == PartitionSpec(None, None)
    assert specs["layers.1.mlp.up_proj.weight"] == PartitionSpec("tp", None)
    assert specs["layers.2.mlp.experts.gate_proj.weight"] == PartitionSpec(None, "tp", None)
    assert specs["layers.3.mlp.experts.down_proj.codes"] == PartitionSpec(None, None, "tp")
    assert specs["layers.3.mlp.experts.down_proj.global_scale"] == PartitionSpec(None)
    assert specs["layers.2.mlp.shared_experts.gate_proj.weight"] == PartitionSpec(None, "tp", None)
    assert specs["layers.2.mlp.shared_experts.down_proj.weight"] == PartitionSpec(None, None, "tp")
    assert specs["mtp.layers.0.block.attn.q_proj.weight"] == PartitionSpec("tp", None)


@pytest.mark.parametrize("field", ["num_key_value_heads", "swa_num_key_value_heads"])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_jx14_inklings_kv_heads_of_either_kind(field, devices):
    config = InklingConfig(**{field: 4})
    if devices <= 4:
        check_dimensions(mesh(devices), PRESETS["tp"], inkling_names.dimensions(config))
    else:
        with pytest.raises(ShardingError, match=f" {field} = 4 does not divide over the 8"):
            check_dimensions(mesh(devices), PRESETS["tp"], inkling_names.dimensions(config))


def test_specs():
    config = FlintConfig(num_hidden_layers=3)
    specs = {name: s.spec for name, s in mesh_shardings(mesh(4), PRESETS["tp"], arrays(config)).items()}
    assert specs["embed_tokens.weight"] == PartitionSpec("tp", None)
    assert specs["layers.0.self_attn.k_proj.weight"] == PartitionSpec("tp", None)
    assert specs["layers.0.self_attn.o_proj.weight"] == PartitionSpec(None, "tp")
    assert specs["layers.0.self_attn.sinks"] == PartitionSpec("tp")
    assert specs["layers.0.mlp.down_proj.weight"] == PartitionSpec(None, "tp")
    assert specs["layers.2.mlp.experts.gate_proj.weight"] == PartitionSpec(None, "tp", None)
    assert specs["layers.2.mlp.experts.down_proj.weight"] == PartitionSpec(None, None, "tp")
    assert specs["layers.2.mlp.gate"] == PartitionSpec(None, None)


@pytest.mark.parametrize("kv_heads", [4, 8, 16])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_jx14_kv_heads_that_do_not_divide_are_refused(kv_heads, devices):
    config = FlintConfig(num_key_value_heads=kv_heads)
    if kv_heads % devices == 0:
        check_dimensions(mesh(devices), PRESETS["tp"], names.dimensions(config))
    else:
        with pytest.raises(ShardingError, match=f"num_key_value_heads = {kv_heads} does not divide over the {devices}"):
            check_dimensions(mesh(devices), PRESETS["tp"], names.dimensions(config))


def test_jx14_every_dimension_that_does_not_divide_is_named():
    config = FlintConfig(num_attention_heads=30, num_key_value_heads=3, intermediate_size=6146, vocab_size=150145)
    with pytest.raises(ShardingError) as caught:
        check_dimensions(mesh(4), PRESETS["tp"], names.dimensions(config))
    message = str(caught.value)
    for name in (
        "num_attention_heads = 30",
        "num_key_value_heads = 3",
        "intermediate_size = 6146",
        "vocab_size = 150145",
    ):
        assert name in message
    assert "moe_intermediate_size" not in message  # 512 divides


def test_jx14_packed_scales_are_not_cut_inside_a_block():
    """32 columns an expert divide over 4 devices as weights, but not as two block scales."""
    config = FlintConfig(num_hidden_layers=3, moe_intermediate_size=32)
    mesh_shardings(mesh(4), PRESETS["tp"], arrays(config))
    with pytest.raises(
        ShardingError, match=r"expert_mlp, dimension 2 of layers\.2\.mlp\.experts\.down_proj\.scales, 2"
    ):
        mesh_shardings(mesh(4), PRESETS["tp"], arrays(config, "nvfp4"))


def test_a_dense_model_has_no_expert_dimensions():
    config = FlintConfig(num_hidden_layers=2, moe_intermediate_size=7)
    check_dimensions(mesh(4), PRESETS["tp"], names.dimensions(config))


def test_mesh_axes():
    table = arrays(FlintConfig(num_hidden_layers=1))
    one = mesh_shardings(mesh(2, axes=("model",)), PRESETS["tp"], table)
    assert one["lm_head.weight"].spec == PartitionSpec("model", None)
    two = mesh_shardings(mesh(2, 2, axes=("data", "tp")), PRESETS["tp"], table)
    assert two["lm_head.weight"].spec == PartitionSpec("tp", None)
    with pytest.raises(ShardingError, match="the mesh has axes a, b, but the rules need tp"):
        mesh_shardings(mesh(2, 2, axes=("a", "b")), PRESETS["tp"], table)


def test_explicit_meshes_become_automatic():
    """`jax.make_mesh` makes explicit axes, on which the models' einsums would be refused."""
    explicit = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Explicit,))
    [sharding] = mesh_shardings(explicit, PRESETS["tp"], {"x": (("heads",), (4,))}).values()
    assert sharding.mesh.axis_types == (AxisType.Auto,)
