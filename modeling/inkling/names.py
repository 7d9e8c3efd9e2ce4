"""What Inkling's parameters are called on disk (spec section 2), and which axes they have.

A leaf is named by its path in the module tree, for example `layers.3.mlp.experts.gate_proj.codes`. On disk gate and up
are one tensor everywhere, `w13`, whose rows alternate between the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from modeling.errors import CheckpointError
from modeling.inkling.config import InklingConfig
from modeling.loading.tensors import OnDisk, Piece, TensorInfo
from sharding.rules import Dimension

TOWERS = ("vision", "audio")
EXTRA_FILES = ("mtp.safetensors",)
OTHER_LAYOUTS = {
    "model.language_model.": "these are transformers' module names; save it again with save_original_format=True",
    ".switch_mlp.": "this is MLX's layout; use the checkpoint that it was converted from",
    ".lora_": "this is an adapter, not a model",
}

_LAYER = {  # of one decoder layer, trunk or drafting depth
    "attn.q_proj.weight": "attn.wq_du.weight",
    "attn.k_proj.weight": "attn.wk_dv.weight",
    "attn.v_proj.weight": "attn.wv_dv.weight",
    "attn.r_proj.weight": "attn.wr_du.weight",
    "attn.o_proj.weight": "attn.wo_ud.weight",
    "attn.rel_proj": "attn.rel_logits_proj.proj",
    "mlp.gate_proj.weight": "mlp.w13_dn.weight",
    "mlp.up_proj.weight": "mlp.w13_dn.weight",
    "mlp.down_proj.weight": "mlp.w2_md.weight",
    "mlp.output_scale": "mlp.global_scale",
    "mlp.gate": "mlp.gate.weight",
    "mlp.gate_bias": "mlp.gate.bias",
    "mlp.gate_scale": "mlp.gate.global_scale",
    "mlp.shared_experts.gate_proj.weight": "mlp.shared_experts.shared_w13_weight",
    "mlp.shared_experts.up_proj.weight": "mlp.shared_experts.shared_w13_weight",
    "mlp.shared_experts.down_proj.weight": "mlp.shared_experts.shared_w2_weight",
}
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_proj|up_proj|down_proj)\.(\w+)")
_ROWS = {"gate_proj": 0, "up_proj": 1}  # of w13
_DEPTH = re.compile(r"model\.mtp\.layers\.(\d+)\.")
_TOWER = re.compile(r"(?:model\.)?(visual|audio)\.")


class _Spelling(NamedTuple):
    """Names of a packed stack of experts, to be completed by `w13` or `w2`."""

    codes: str
    scales: str
    global_scale: str
    encodes: bool  # the global scale divides the codes' values, instead of multiplying them


_SPELLINGS = (
    _Spelling("{}_weight", "{}_weight.scale", "{}_weight.scale2", False),  # released
    _Spelling("{}_weight.weight_packed", "{}_weight.weight_scale", "{}_weight.weight_global_scale", True),
    _Spelling("{}_weight_packed", "{}_weight_scale", "{}_weight_global_scale", True),
)
# Tensors about a packed stack that weight-only arithmetic has no use for: ranges of activations, the unpacked shape.
_UNUSED = (".input_amax", ".original_shape", ".input_global_scale", "_input_global_scale")


def is_router(leaf: str) -> bool:
    """Routers have no precision of their own: their weights are bfloat16 on disk and their arithmetic is float32."""
    del leaf
    return False


def is_matrix(leaf: str) -> bool:
    """Whether the leaf is a matrix that compute multiplies with: not a norm, short convolution, bias or scale, which
    may stay float32."""
    return not ("norm" in leaf or "sconv" in leaf or leaf.endswith(("_scale", "_bias")))


def options(config: InklingConfig, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """How the model of this checkpoint is made, see `modeling.inkling.model.Inkling`: by what is there.

    Raises:
        CheckpointError: there is a part of a vision tower.
    """
    depths = {int(match[1]) for name in tensors if (match := _DEPTH.match(name))}
    towers = {match[1] for name in tensors if (match := _TOWER.match(name))}
    return {
        "expert_formats": tuple(_expert_format(i, tensors) for i in range(config.num_hidden_layers)),
        "num_mtp_layers": min(max(depths, default=-1) + 1, config.mtp.num_layers if config.mtp else 0),
        "vision": _vision_linears(config, tensors) if config.vision and "visual" in towers else (),
        "audio": config.audio is not None and "audio" in towers,
    }


def _vision_linears(config: InklingConfig, tensors: Mapping[str, TensorInfo]) -> tuple[tuple[int, ...], ...]:
    """Sizes of the vision tower's layers, which no config tells."""
    assert config.vision is not None
    names = [_disk_name(f"vision.linears.{i}.weight", tensors) for i in range(config.vision.num_layers)]
    if absent := [name for name in names if name not in tensors]:
        raise CheckpointError(f"missing tensors of the vision tower: {', '.join(absent)}")
    shapes = tuple(tensors[name].shape for name in names)
    if any(len(shape) != 2 for shape in shapes) or shapes[-1][0] != config.hidden_size:
        raise CheckpointError(
            f"the vision tower's layers must be matrices, the last of {config.hidden_size} rows, not of shapes {shapes}"
        )
    return shapes


def _expert_format(layer: int, tensors: Mapping[str, TensorInfo]) -> str:
    stack = f"model.llm.layers.{layer}.mlp.experts."
    return "nvfp4" if any(stack + spelling.scales.format("w13") in tensors for spelling in _SPELLINGS) else "bf16"


def notices(config: InklingConfig, options: Mapping[str, Any], text_only: bool) -> list[str]:
    """What a checkpoint lacks that the config describes, and that the model runs without."""
    found, described = options["num_mtp_layers"], config.mtp.num_layers if config.mtp else 0
    lines = []
    if found < described:
        rest = f"no more than {found} tokens a step can be drafted" if found else "it runs without drafting"
        lines.append(f"{found} of the {described} drafting depths in config.json are there: {rest}")
    if config.vision and not options["vision"] and not text_only:
        lines.append("there is no vision tower: it cannot see pictures")
    if config.audio and not options["audio"] and not text_only:
        lines.append("there is no audio tower: it cannot hear sound")
    return lines


def on_disk(leaf: str, shape: tuple[int, ...], tensors: Mapping[str, TensorInfo]) -> OnDisk:
    """What a leaf is made of in a safetensors checkpoint.

    Args:
        leaf: the leaf's name. shape: its shape.
        tensors: those of the checkpoint, to choose between spellings.
    """
    if match := _EXPERTS.fullmatch(leaf):
        return _experts(f"model.llm.{match[1]}.", match[2], match[3], shape, tensors)
    name = _disk_name(leaf, tensors)
    if leaf.endswith("sconv.weight"):
        return OnDisk((Piece(name, (shape[0], 1, shape[1])),))  # the 1 is a convolution's channels a group
    row = _ROWS.get(leaf.split(".")[-2])
    return OnDisk((Piece(name, shape if row is None else _doubled(shape)),), row=row)


def _disk_name(leaf: str, tensors: Mapping[str, TensorInfo]) -> str:
    first, *rest = leaf.split(".")
    if first == "layers":
        return f"model.llm.layers.{rest[0]}.{_layer_name(rest[1:])}"
    if first == "mtp":
        if "block" in rest:
            return f"model.mtp.layers.{rest[1]}.transformer_block.{_layer_name(rest[3:])}"
        return f"model.{leaf}"
    if first == "audio":
        return _bare_or_not(leaf, tensors)
    if first == "vision":
        if rest[0] in ("linears", "norms"):
            rest = ["layers", f"{rest[0].removesuffix('s')}_{rest[1]}", rest[2]]
        return _bare_or_not(".".join(["visual", *rest]), tensors)
    return f"model.llm.{leaf}"


def _layer_name(path: list[str]) -> str:
    name = ".".join(path)
    return _LAYER.get(name, name)


def _bare_or_not(name: str, tensors: Mapping[str, TensorInfo]) -> str:
    return name if name in tensors and f"model.{name}" not in tensors else f"model.{name}"


def _experts(
    prefix: str, projection: str, part: str, shape: tuple[int, ...], tensors: Mapping[str, TensorInfo]
) -> OnDisk:
    tensor, row = ("w2", None) if projection == "down_proj" else ("w13", _ROWS[projection])
    if part == "weight":
        return OnDisk((Piece(f"{prefix}{tensor}_weight", shape if row is None else _doubled(shape)),), row=row)
    spelled = [s for s in _SPELLINGS if prefix + s.scales.format(tensor) in tensors]
    spelling = spelled[0] if spelled else _SPELLINGS[0]
    name = prefix + getattr(spelling, part).format(tensor)
    if part != "global_scale":
        types = ("U8",) if part == "codes" else ("F8_E4M3",)
        in_bytes = (*shape[:-1], 2 * shape[-1]) if part == "codes" else shape  # of codes a leaf holds 16-bit words
        return OnDisk((Piece(name, in_bytes if row is None else _doubled(in_bytes)),), types, row)
    # One a stack on disk, for gate and up alike; some writers give it trailing axes of 1.
    found = tensors[name].shape if name in tensors else shape
    flat = found[: len(shape)] == shape and all(size == 1 for size in found[len(shape) :])
    return OnDisk((Piece(name, found if flat else shape),), ("F32",), reciprocal=spelling.encodes)


def _doubled(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the tensor whose rows two leaves of this shape share."""
    return (*shape[:-2], 2 * shape[-2], shape[-1])


def is_ignored(tensor: str, text_only: bool) -> bool:
    """Whether a tensor that is not read may be there all the same."""
    return (".mlp.experts." in tensor and tensor.endswith(_UNUSED)) or (text_only and bool(_TOWER.match(tensor)))


def refusal(tensor: str, config: InklingConfig) -> str | None:
    """Why a tensor that is in no table is refused, where there is more to say than that."""
    if match := _TOWER.match(tensor):
        block = "vision_config" if match[1] == "visual" else "audio_config"
        if getattr(config, block.removesuffix("_config")) is None:
            return f"config.json has no {block}; add it, or load the text model alone (text_only)"
    if _DEPTH.match(tensor):
        return f"config.json describes {config.mtp.num_layers if config.mtp else 0} drafting depths"
    if ".experts." in tensor:
        return "experts are read as they are released, a layer's stacked in w13_weight and w2_weight"
    return None


_AXES = {  # of a matrix [out, in]
    "embed": ("vocab", None),
    "unembed": ("vocab", None),
    "q_proj": ("heads", None),
    "k_proj": ("kv_heads", None),
    "v_proj": ("kv_heads", None),
    "r_proj": ("heads", None),
    "o_proj": (None, "heads"),
    "k_sconv": ("kv_heads", None),
    "v_sconv": ("kv_heads", None),
    "gate_proj": ("mlp", None),
    "up_proj": ("mlp", None),
    "down_proj": (None, "mlp"),
}


def logical_axes(leaf: str, ndim: int) -> tuple[str | None, ...]:
    """What each dimension of a leaf means, for `sharding.rules`; None for what is never split."""
    axes = _AXES.get(leaf.split(".")[-2])
    if axes is None or leaf.endswith(".global_scale"):
        return (None,) * ndim
    if ".experts." in leaf or ".shared_experts." in leaf:
        return (None, *("expert_mlp" if axis == "mlp" else axis for axis in axes))
    return axes


def dimensions(config: InklingConfig) -> list[Dimension]:
    """What of an Inkling model may be split only in whole units."""
    fields = [("vocab", "vocab_size")]
    fields += [("heads", "num_attention_heads"), ("heads", "swa_num_attention_heads")]
    fields += [("kv_heads", "num_key_value_heads"), ("kv_heads", "swa_num_key_value_heads")]
    fields += [("mlp", "intermediate_size"), ("expert_mlp", "moe_intermediate_size")]
    return [Dimension(axis, field, getattr(config, field)) for axis, field in fields]
