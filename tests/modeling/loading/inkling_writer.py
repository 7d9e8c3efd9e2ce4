"""Small Inkling checkpoints in the released layout, for `checkpoint_writer` to write.

The names and shapes below are typed from the format's description, not taken from the loader's own tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from checkpoint_writer import BF16, F32, Tensors

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
I64 = np.dtype(np.int64)


def inkling_config(depths: int = 0, towers: bool = False, **changes: Any) -> dict[str, Any]:
    """A released `config.json`: 5 layers, two dense, three sparse, the fourth of them full. An expert's w13 is square.

    Args:
        changes: to `text_config`.
    """
    text = dict(
        model_max_length=4096,
        torch_dtype="bfloat16",
        hidden_size=64,
        num_hidden_layers=5,
        vocab_size=96,
        unpadded_vocab_size=90,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        swa_num_attention_heads=8,
        swa_num_key_value_heads=4,
        swa_head_dim=16,
        sliding_window_size=8,
        d_rel=4,
        rel_extent=16,
        local_layer_ids=[0, 1, 2, 4],
        dense_mlp_idx=2,
        sconv_kernel_size=4,
        logits_mup_width_multiplier=2.0,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=2,
        dense_intermediate_size=128,
        intermediate_size=32,
        route_scale=2.5,
    )
    config: dict[str, Any] = dict(model_type="inkling_mm_model", text_config=text | changes)
    if depths:
        sliding = [k for k in range(depths) if k != 1]
        config["mtp_config"] = dict(num_nextn_predict_layers=depths, local_layer_ids=sliding)
    if towers:
        config["vision_config"] = dict(patch_size=8, temporal_patch_size=2, n_channels=3, n_layers=2)
        config["audio_config"] = dict(n_mel_bins=5, mel_vocab_size=16)
    return config


class _Draw:
    """Random tensors of one checkpoint."""

    def __init__(self, config: Mapping[str, Any], rng: Any):
        self.rng, self.text, self.tensors = rng, config["text_config"], {}

    def __call__(self, name: str, *shape: int, dtype: np.dtype = BF16, mean: float = 0.0) -> None:
        scale = 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.3
        self.tensors[name] = (mean + scale * self.rng.standard_normal(shape, np.float32)).astype(dtype)

    def attention(self, layer: str, sliding: bool) -> None:
        t, prefix = self.text, "swa_" if sliding else ""
        h, d = t["hidden_size"], t[f"{prefix}head_dim"]
        heads, kv = t[f"{prefix}num_attention_heads"], t[f"{prefix}num_key_value_heads"]
        self(f"{layer}attn_norm.weight", h, mean=1)
        self(f"{layer}mlp_norm.weight", h, mean=1)
        self(f"{layer}attn.wq_du.weight", heads * d, h)
        self(f"{layer}attn.wk_dv.weight", kv * d, h)
        self(f"{layer}attn.wv_dv.weight", kv * d, h)
        self(f"{layer}attn.wr_du.weight", heads * t["d_rel"], h)
        self(f"{layer}attn.wo_ud.weight", h, heads * d)
        self(f"{layer}attn.q_norm.weight", d, mean=1)
        self(f"{layer}attn.k_norm.weight", d, mean=1)
        reach = t["sliding_window_size"] if sliding else t["rel_extent"]
        self(f"{layer}attn.rel_logits_proj.proj", t["d_rel"], reach)
        self(f"{layer}attn.k_sconv.weight", kv * d, 1, 4)
        self(f"{layer}attn.v_sconv.weight", kv * d, 1, 4)
        self(f"{layer}attn_sconv.weight", h, 1, 4)
        self(f"{layer}mlp_sconv.weight", h, 1, 4)

    def dense(self, layer: str) -> None:
        h, width = self.text["hidden_size"], self.text["dense_intermediate_size"]
        self(f"{layer}mlp.w13_dn.weight", 2 * width, h)
        self(f"{layer}mlp.w2_md.weight", h, width)
        self(f"{layer}mlp.global_scale", 1, mean=1)

    def sparse(self, layer: str) -> None:
        t = self.text
        h, width, experts, shared = (
            t[name] for name in ("hidden_size", "intermediate_size", "n_routed_experts", "n_shared_experts")
        )
        self(f"{layer}mlp.gate.weight", experts + shared, h)
        self(f"{layer}mlp.gate.bias", experts, dtype=F32)
        self(f"{layer}mlp.gate.global_scale", 1, dtype=F32, mean=1)
        self(f"{layer}mlp.experts.w13_weight", experts, 2 * width, h)
        self(f"{layer}mlp.experts.w2_weight", experts, h, width)
        self(f"{layer}mlp.shared_experts.shared_w13_weight", shared, 2 * width, h)
        self(f"{layer}mlp.shared_experts.shared_w2_weight", shared, h, width)


def inkling_tensors(config: Mapping[str, Any], rng: Any = None) -> Tensors:
    """A released BF16 checkpoint's tensors: the trunk, and the towers that the config describes."""
    draw = _Draw(config, rng or np.random.default_rng(0))
    t = config["text_config"]
    h = t["hidden_size"]
    draw("model.llm.embed.weight", t["vocab_size"], h)
    draw("model.llm.embed_norm.weight", h, mean=1)
    draw("model.llm.norm.weight", h, mean=1)
    draw("model.llm.unembed.weight", t["vocab_size"], h)
    for i in range(t["num_hidden_layers"]):
        layer = f"model.llm.layers.{i}."
        draw.attention(layer, i in t["local_layer_ids"])
        if i < t["dense_mlp_idx"]:
            draw.dense(layer)
        else:
            draw.sparse(layer)
    if "vision_config" in config:
        draw("model.visual.layers.linear_0.weight", 24, 3 * 4 * 4)
        draw("model.visual.layers.norm_0.weight", 24, mean=1)
        draw("model.visual.layers.linear_1.weight", h, 24 * 2 * 2 * 2)
        draw("model.visual.final_norm.weight", h, mean=1)
    if "audio_config" in config:
        draw("model.audio.encoder.weight", 5 * 16, h)
        draw("model.audio.final_norm.weight", h, mean=1)
    return draw.tensors


def mtp_tensors(config: Mapping[str, Any], rng: Any = None) -> Tensors:
    """The drafting depths' tensors, which are released in a file of their own."""
    draw = _Draw(config, rng or np.random.default_rng(1))
    h, block = draw.text["hidden_size"], config["mtp_config"]
    for k in range(block["num_nextn_predict_layers"]):
        depth = f"model.mtp.layers.{k}."
        draw(f"{depth}hidden_norm.weight", h, mean=1)
        draw(f"{depth}embed_norm.weight", h, mean=1)
        draw(f"{depth}input_proj.weight", h, 2 * h)
        draw.attention(f"{depth}transformer_block.", k in block["local_layer_ids"])
        draw.dense(f"{depth}transformer_block.")
    return draw.tensors


def stacks(layers: Iterable[int]) -> list[str]:
    """Names of the routed experts' tensors of some layers."""
    return [f"model.llm.layers.{i}.mlp.experts.{part}_weight" for i in layers for part in ("w13", "w2")]


def packed(tensors: Tensors, layers: Iterable[int], rng: Any = None) -> Tensors:
    """The checkpoint with the experts of some layers replaced by random NVFP4 ones in the released layout.

    Scales have both signs; the global scales are powers of two, whose reciprocals are exact.
    """
    rng, tensors = rng or np.random.default_rng(2), dict(tensors)
    for name in stacks(layers):
        shape = tensors.pop(name).shape
        tensors[name] = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
        magnitudes = rng.integers(0x20, 0x40, (*shape[:-1], shape[-1] // 16), dtype=np.uint8)
        signs = rng.integers(0, 2, magnitudes.shape, dtype=np.uint8) << 7
        tensors[f"{name}.scale"] = (magnitudes | signs).view(E4M3)
        exponents = rng.integers(-9, -4, shape[:1], dtype=np.int32)
        tensors[f"{name}.scale2"] = np.ldexp(np.float32(1), exponents)
        tensors[f"{name}.input_amax"] = np.array([3.0]).astype(BF16)
        tensors[f"{name}.original_shape"] = np.array(shape, I64)
    return tensors


def compressed(tensors: Tensors, layers: Iterable[int], flat: bool) -> Tensors:
    """A `packed` checkpoint as compressed-tensors spells it, whose global scales divide."""
    tensors = dict(tensors)
    for name in stacks(layers):
        base = name if flat else f"{name}.weight"
        tensors[f"{base}_packed"] = tensors.pop(name)
        tensors[f"{base}_scale"] = tensors.pop(f"{name}.scale")
        tensors[f"{base}_global_scale"] = 1 / tensors.pop(f"{name}.scale2")
        activations = name.replace("_weight", "_input_global_scale") if flat else f"{name}.input_global_scale"
        tensors[activations] = np.ones(len(tensors[f"{base}_global_scale"]), F32)
        del tensors[f"{name}.input_amax"], tensors[f"{name}.original_shape"]
    return tensors


def unpacked(tensors: Tensors, name: str) -> np.ndarray:
    """What a packed stack stands for, float32, by the format's definition: low nibbles are the even columns."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([values, -values])
    codes = tensors[name]
    columns = np.stack([values[codes & 15], values[codes >> 4]], axis=-1).reshape(*codes.shape[:-1], -1)
    scales = np.repeat(tensors[f"{name}.scale"].astype(np.float32), 16, axis=-1)
    return columns * scales * tensors[f"{name}.scale2"][:, None, None]
