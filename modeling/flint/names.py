"""What Flint's parameters are called on disk, in both released layouts, and which axes they have.

A leaf is named by its path in the module tree, for example `layers.3.mlp.experts.gate_proj.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from modeling.flint.config import FlintConfig
from modeling.loading.tensors import OnDisk, Piece, TensorInfo
from sharding.rules import Dimension

TOWERS: tuple[str, ...] = ()
EXTRA_FILES: tuple[str, ...] = ()
OTHER_LAYOUTS: dict[str, str] = {}

_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_proj|up_proj|down_proj)\.weight")

_GGUF_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}


def is_router(leaf: str) -> bool:
    """Whether the leaf is a router's weights, whose precision is chosen apart from the others'."""
    return leaf.endswith(".mlp.gate")


def is_matrix(leaf: str) -> bool:
    """Whether the leaf is a matrix that compute multiplies with: not a norm, sink, scale or router, which may
    stay float32."""
    return not (is_router(leaf) or leaf.endswith((".sinks", ".global_scale")) or "norm." in leaf)


def options(config: FlintConfig, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """How the model of this checkpoint is made, see `modeling.flint.model.Flint`."""
    del config
    packed = any(name.startswith("blk.") for name in tensors)  # a GGUF file
    suffix = ".ffn_gate_inp.weight" if packed else ".mlp.gate.weight"
    routers = {info.dtype for name, info in tensors.items() if name.endswith(suffix)}
    return {
        "weight_format": "nvfp4" if packed else "bf16",
        "router_dtype": "bfloat16" if routers == {"BF16"} else "float32",
    }


def notices(config: FlintConfig, options: Mapping[str, Any], text_only: bool) -> list[str]:
    """What a checkpoint lacks that the config describes: nothing that Flint could do without."""
    del config, options, text_only
    return []


def on_disk(leaf: str, shape: tuple[int, ...], tensors: Mapping[str, TensorInfo]) -> OnDisk:
    """What a leaf is made of in a safetensors checkpoint.

    Args:
        leaf: the leaf's name. shape: its shape.
        tensors: those of the checkpoint, to choose between spellings: `softmax_offset` (released) or `sinks`, and one
            tensor an expert (released) or fused experts, whose `gate_up_proj` stacks gate above up.
    """
    disk = leaf if leaf.startswith("lm_head.") else "model." + leaf
    if match := _EXPERTS.fullmatch(disk):
        return OnDisk(tuple(_expert_pieces(match[1], match[2], shape, tensors)))
    if is_router(leaf):
        disk += ".weight"
    elif leaf.endswith(".sinks") and disk not in tensors:
        disk = disk.removesuffix("sinks") + "softmax_offset"
    return OnDisk((Piece(disk, shape),))


def _expert_pieces(
    stack: str, projection: str, shape: tuple[int, ...], tensors: Mapping[str, TensorInfo]
) -> list[Piece]:
    experts, rows, columns = shape
    size = rows * columns
    fused = f"{stack}.down_proj" if projection == "down_proj" else f"{stack}.gate_up_proj"
    if fused not in tensors:
        return [Piece(f"{stack}.{e}.{projection}.weight", (rows, columns), target=e * size) for e in range(experts)]
    if projection == "down_proj":
        return [Piece(fused, shape)]
    start = 0 if projection == "gate_proj" else size
    return [
        Piece(fused, (experts, 2 * rows, columns), source=2 * e * size + start, target=e * size, size=size)
        for e in range(experts)
    ]


def gguf_name(leaf: str) -> tuple[str, str]:
    """A leaf's tensor in a GGUF file, and its part: "weight", "codes", "scales" or "global_scale".

    Codes and scales are in one tensor, `<base>.weight`; the global scale is `<base>.scale`.
    """
    path, _, part = leaf.rpartition(".")
    if part not in ("weight", "codes", "scales", "global_scale"):
        path, part = leaf, "weight"  # sinks and routers are parameters without a module of their own
    if path in _GGUF_TOP:
        base = _GGUF_TOP[path]
    else:
        _, layer, module = path.split(".", 2)
        base = f"blk.{layer}.{_GGUF_LAYER[module]}"
    return f"{base}.{'scale' if part == 'global_scale' else 'weight'}", part


def is_ignored(tensor: str, text_only: bool) -> bool:
    """Whether a tensor that is not read may be there all the same."""
    del tensor, text_only
    return False


def refusal(tensor: str, config: FlintConfig) -> str | None:
    """Why a tensor that is in no table is refused, where there is more to say than that."""
    del config
    if "ffn_gate_up" in tensor:
        return "gate and up are fused in one tensor; only the released form, one tensor each, is supported"
    return None


_AXES = {  # of a matrix [out, in]
    "embed_tokens": ("vocab", None),
    "lm_head": ("vocab", None),
    "q_proj": ("heads", None),
    "k_proj": ("kv_heads", None),
    "v_proj": ("kv_heads", None),
    "o_proj": (None, "heads"),
    "gate_proj": ("mlp", None),
    "up_proj": ("mlp", None),
    "down_proj": (None, "mlp"),
}


def logical_axes(leaf: str, ndim: int) -> tuple[str | None, ...]:
    """What each dimension of a leaf means, for `sharding.rules`; None for what is never split."""
    if leaf.endswith(".sinks"):
        return ("heads",)
    axes = _AXES.get(leaf.split(".")[-2])
    if axes is None or leaf.endswith(".global_scale"):
        return (None,) * ndim  # norms, routers and scales are small
    if ".experts." in leaf:
        return ("experts", *("expert_mlp" if axis == "mlp" else axis for axis in axes))
    return axes


def dimensions(config: FlintConfig) -> list[Dimension]:
    """What of a Flint model may be split only in whole units."""
    fields = [("vocab", "vocab_size"), ("heads", "num_attention_heads"), ("kv_heads", "num_key_value_heads")]
    if not all(config.sparse_layers):
        fields.append(("mlp", "intermediate_size"))
    if any(config.sparse_layers):
        fields += [("mlp", "shared_expert_intermediate_size"), ("expert_mlp", "moe_intermediate_size")]
    return [Dimension(axis, field, getattr(config, field)) for axis, field in fields]
