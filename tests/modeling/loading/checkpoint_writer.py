"""Small checkpoints written byte by byte, so that tests can also write wrong ones.

The names and shapes below are typed from the formats' description, not taken from the loader's own tables.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
_ST_NAMES = {"bfloat16": "BF16", "float32": "F32", "float16": "F16", "uint8": "U8", "int32": "I32", "int64": "I64"}
_ST_NAMES |= {"float8_e4m3fn": "F8_E4M3"}

# GGUF type ids, and bytes a block of how many elements.
GGUF_F32, GGUF_F16, GGUF_Q8_0, GGUF_BF16, GGUF_NVFP4 = 0, 1, 8, 30, 40

Tensors = dict[str, np.ndarray]


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A `config.json`: 3 layers, the first two dense and full attention, the last full and sparse."""
    return (
        dict(
            model_type="flint",
            vocab_size=96,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=16,
            intermediate_size=128,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            num_experts=4,
            num_experts_per_tok=2,
            sliding_window=9,
            dtype="bfloat16",
            layer_types=["full_attention", "full_attention", "sliding_attention"],
        )
        | changes
    )


def _linears(c: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Every ordinary linear layer by its released name, [out, in]."""
    h, heads, kv, d = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    shapes = {"lm_head": (c["vocab_size"], h)}
    for i in range(c["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes |= {f"{attention}.q_proj": (heads * d, h), f"{attention}.k_proj": (kv * d, h)}
        shapes |= {f"{attention}.v_proj": (kv * d, h), f"{attention}.o_proj": (h, heads * d)}
        width = c["intermediate_size"]
        if i > 1:
            mlp, width = mlp + ".shared_expert", c["shared_expert_intermediate_size"]
        shapes |= {f"{mlp}.gate_proj": (width, h), f"{mlp}.up_proj": (width, h), f"{mlp}.down_proj": (h, width)}
    return shapes


def released_tensors(config: Mapping[str, Any], rng: Any = None) -> Tensors:
    """A released BF16 checkpoint's tensors, one an expert, float32 routers and sinks, filled at random."""
    rng, h = rng or np.random.default_rng(0), config["hidden_size"]

    def draw(shape: tuple[int, ...], dtype: np.dtype = BF16, mean: float = 0.0) -> np.ndarray:
        scale = 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.3
        return (mean + scale * rng.standard_normal(shape, np.float32)).astype(dtype)

    tensors = {f"{name}.weight": draw(shape) for name, shape in _linears(config).items()}
    tensors["model.embed_tokens.weight"] = draw((config["vocab_size"], h))
    tensors["model.norm.weight"] = draw((h,), mean=1)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{norm}.weight"] = draw((h,), mean=1)
        for norm in ("q_norm", "k_norm"):
            tensors[f"{layer}self_attn.{norm}.weight"] = draw((config["head_dim"],), mean=1)
        tensors[f"{layer}self_attn.softmax_offset"] = draw((config["num_attention_heads"],), F32)
        if i > 1:
            width = config["moe_intermediate_size"]
            tensors[f"{layer}mlp.gate.weight"] = draw((config["num_experts"], h), F32)
            for e in range(config["num_experts"]):
                expert = f"{layer}mlp.experts.{e}."
                tensors[f"{expert}gate_proj.weight"] = draw((width, h))
                tensors[f"{expert}up_proj.weight"] = draw((width, h))
                tensors[f"{expert}down_proj.weight"] = draw((h, width))
    return tensors


def fused_tensors(tensors: Tensors) -> Tensors:
    """The same model with each layer's experts in two tensors, `gate_up_proj` and `down_proj`."""
    fused = {name: array for name, array in tensors.items() if ".experts." not in name}
    for layer in sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name}):
        count = len([name for name in tensors if name.startswith(layer + ".experts.")]) // 3

        def stack(part: str, layer: str = layer, count: int = count) -> np.ndarray:
            return np.stack([tensors[f"{layer}.experts.{e}.{part}.weight"] for e in range(count)])

        fused[f"{layer}.experts.gate_up_proj"] = np.concatenate([stack("gate_proj"), stack("up_proj")], axis=1)
        fused[f"{layer}.experts.down_proj"] = stack("down_proj")
    return fused


def safetensors_header(tensors: Tensors) -> dict[str, Any]:
    """The JSON header of these tensors, in this order."""
    header, end = {}, 0
    for name, array in tensors.items():
        dtype = _ST_NAMES[array.dtype.name]
        header[name] = dict(dtype=dtype, shape=list(array.shape), data_offsets=[end, end + array.nbytes])
        end += array.nbytes
    return header


def write_safetensors(path: Path, tensors: Tensors, header: bytes | None = None) -> None:
    """Writes one file; `header` replaces the JSON, for files that lie."""
    raw = json.dumps(safetensors_header(tensors)).encode() if header is None else header
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for array in tensors.values():
            file.write(array.tobytes())


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """A safetensors checkpoint folder; more than one shard brings an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        write_safetensors(folder / file, {name: tensors[name] for name in tensors if weight_map[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


class GgufTensor(NamedTuple):
    """A tensor as GGUF stores it; `shape` outermost first (the file reverses it)."""

    kind: int
    shape: tuple[int, ...]
    data: bytes


def gguf_tensors(config: Mapping[str, Any], rng: Any = None) -> dict[str, GgufTensor]:
    """A released NVFP4 file's tensors: random codes and scale bytes, float32 norms, sinks and routers."""
    rng, h, experts = rng or np.random.default_rng(0), config["hidden_size"], config["num_experts"]
    tensors: dict[str, GgufTensor] = {}

    def plain(name: str, shape: tuple[int, ...], mean: float = 0.0, scale: float = 0.3) -> None:
        values = (mean + scale * rng.standard_normal(shape)).astype(np.float32)
        tensors[name] = GgufTensor(GGUF_F32, shape, values.tobytes())

    def packed(base: str, *shape: int) -> None:
        blocks = rng.integers(0, 256, (math.prod(shape) // 64, 36), dtype=np.uint8)
        blocks[:, :4] = rng.integers(0x20, 0x40, (len(blocks), 4), dtype=np.uint8)
        tensors[f"{base}.weight"] = GgufTensor(GGUF_NVFP4, shape, blocks.tobytes())
        scales = (0.3 / math.sqrt(shape[-1]) * rng.uniform(0.5, 2, shape[:-2] or (1,))).astype(np.float32)
        tensors[f"{base}.scale"] = GgufTensor(GGUF_F32, scales.shape, scales.tobytes())

    embedding = rng.standard_normal((config["vocab_size"], h)).astype(BF16)
    tensors["token_embd.weight"] = GgufTensor(GGUF_BF16, embedding.shape, embedding.tobytes())
    plain("output_norm.weight", (h,), 1)
    packed("output", config["vocab_size"], h)
    heads, kv, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    for i in range(config["num_hidden_layers"]):
        block = f"blk.{i}."
        for norm, size in dict(attn_norm=h, ffn_norm=h, attn_q_norm=d, attn_k_norm=d).items():
            plain(f"{block}{norm}.weight", (size,), 1)
        plain(f"{block}attn_sinks.weight", (heads,))
        packed(f"{block}attn_q", heads * d, h)
        packed(f"{block}attn_k", kv * d, h)
        packed(f"{block}attn_v", kv * d, h)
        packed(f"{block}attn_output", h, heads * d)
        stacks: list[tuple[str, tuple[int, ...], int]]
        if i < 2:
            stacks = [("", (), config["intermediate_size"])]
        else:
            plain(f"{block}ffn_gate_inp.weight", (experts, h))
            stacks = [("_exps", (experts,), config["moe_intermediate_size"])]
            stacks.append(("_shexp", (), config["shared_expert_intermediate_size"]))
        for suffix, lead, width in stacks:
            packed(f"{block}ffn_gate{suffix}", *lead, width, h)
            packed(f"{block}ffn_up{suffix}", *lead, width, h)
            packed(f"{block}ffn_down{suffix}", *lead, h, width)
    return tensors


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(value: Any) -> bytes:
    """A typed metadata value: bool, int (uint32), str, or a list of one of them."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    kind = struct.unpack("<I", gguf_value(value[0])[:4])[0]
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(gguf_value(item)[4:] for item in value)


def write_gguf(
    path: Path,
    tensors: Mapping[str, GgufTensor] | list[tuple[str, GgufTensor]],
    metadata: Mapping[str, Any] | list[tuple[str, Any]] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    shift: int = 0,
) -> None:
    """Writes one file. Lists may hold a name twice; `shift` is added to every offset after the first."""
    entries = list(tensors.items()) if isinstance(tensors, Mapping) else tensors
    keys = [("general.architecture", "flint")]
    keys += list(metadata.items()) if isinstance(metadata, Mapping) else metadata or []
    header = magic + struct.pack("<IQQ", version, len(entries), len(keys))
    for key, value in keys:
        header += _string(key) + gguf_value(value)
    data = bytearray()
    for name, tensor in entries:
        offset = len(data) + (shift if data else 0)
        header += _string(name) + struct.pack("<I", len(tensor.shape))
        header += b"".join(struct.pack("<Q", n) for n in reversed(tensor.shape))
        header += struct.pack("<IQ", tensor.kind, offset)
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    path.write_bytes(header + bytes(-len(header) % alignment) + data)


def write_gguf_folder(folder: Path, config: Mapping[str, Any], tensors: Any, metadata: Any = None, **lies: Any) -> Path:
    """A folder of `config.json` and `model.gguf`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_gguf(folder / "model.gguf", tensors, metadata, **lies)
    return folder
