"""Writes a trained model in the released layouts: BF16 safetensors and NVFP4 GGUF.

python -m checkpoints.training.export RUN/params.npz
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from checkpoints.training import nvfp4
from checkpoints.training.forward import is_float32, is_quantised
from checkpoints.training.shape import config_json
from checkpoints.training.tokenizer import CHECKPOINT, END, SPECIAL, TAGS, load_tokenizer

Arrays = dict[str, np.ndarray]
NVFP4_FOLDER = CHECKPOINT.parent / "flint-tiny-nvfp4"
TENSOR_NVFP4, FILE_NVFP4 = gguf.GGMLQuantizationType.NVFP4, gguf.LlamaFileType.MOSTLY_NVFP4

# A name's parts on disk -> in GGUF, for what is not named alike.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.softmax_offset": "attn_sinks",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip


def on_disk(params: Arrays) -> Arrays:
    """Training parameters as the BF16 checkpoint stores them: one tensor an expert, routers and sinks in float32."""
    tensors: Arrays = {}
    for name, value in params.items():
        value = np.asarray(value, np.float32 if is_float32(name) else ml_dtypes.bfloat16)
        if ".experts." in name:
            before, after = name.split(".experts.")
            tensors |= {f"{before}.experts.{e}.{after}": matrix for e, matrix in enumerate(value)}
        else:
            tensors[name] = value
    return {name: np.ascontiguousarray(value) for name, value in tensors.items()}


def gguf_name(name: str) -> str:
    """The GGUF name of a training parameter."""
    base = name.removesuffix(".weight")
    if not base.startswith("model.layers."):
        return f"{GGUF_NAMES[base]}.weight"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.weight"


def gguf_tensors(params: Arrays) -> Iterator[tuple[str, np.ndarray, gguf.GGMLQuantizationType]]:
    """Name, data and type of every tensor of the NVFP4 file, quantised from the BF16 weights."""
    for name, value in params.items():
        base = gguf_name(name)
        if is_quantised(name):
            codes, scales, unit = nvfp4.quantize(np.asarray(value, ml_dtypes.bfloat16).astype(np.float32))
            yield base, nvfp4.to_gguf_bytes(codes, scales), TENSOR_NVFP4
            yield f"{base.removesuffix('.weight')}.scale", unit.reshape(-1), gguf.GGMLQuantizationType.F32
        elif name == "model.embed_tokens.weight":
            rounded = np.asarray(value, ml_dtypes.bfloat16)
            yield base, rounded.view(np.uint8), gguf.GGMLQuantizationType.BF16
        else:
            value = np.asarray(value, np.float32 if is_float32(name) else ml_dtypes.bfloat16)
            yield base, value.astype(np.float32), gguf.GGMLQuantizationType.F32


def read_safetensors(folder: Path) -> Arrays:
    """The training parameters (float32) in a BF16 checkpoint: the inverse of `write_safetensors`."""
    tensors = {name: value.astype(np.float32) for name, value in load_file(folder / "model.safetensors").items()}
    params: Arrays = {name: value for name, value in tensors.items() if ".experts." not in name}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name in tensors.keys() - params.keys():
        before, after = name.split(".experts.")
        expert, rest = after.split(".", 1)
        stacks.setdefault(f"{before}.experts.{rest}", {})[int(expert)] = tensors[name]
    return params | {name: np.stack([stack[e] for e in range(len(stack))]) for name, stack in stacks.items()}


def read_gguf(folder: Path) -> Arrays:
    """The training parameters (float32, dequantised) in an NVFP4 checkpoint."""
    tensors = {t.name: t for t in gguf.GGUFReader(folder / "model-nvfp4.gguf").tensors}
    params: Arrays = {}
    for name in read_safetensors(CHECKPOINT):
        tensor = tensors[gguf_name(name)]
        if tensor.tensor_type == TENSOR_NVFP4:
            unit = tensors[gguf_name(name).replace(".weight", ".scale")].data
            codes, scales = nvfp4.from_gguf_bytes(tensor.data)
            params[name] = nvfp4.dequantize(codes, scales, unit if codes.ndim == 3 else unit[0])
        elif tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            params[name] = tensor.data.view(ml_dtypes.bfloat16).astype(np.float32)
        else:
            params[name] = np.array(tensor.data)
    return params


def write_safetensors(params: Arrays, folder: Path) -> None:
    """Writes model.safetensors and config.json."""
    save_file(on_disk(params), folder / "model.safetensors", metadata={"format": "pt"})
    write_configs(folder)


def write_configs(folder: Path) -> None:
    """Writes config.json and generation_config.json."""
    ids = load_tokenizer().get_vocab()
    ends = [ids[text] for text in END]
    write_json(folder / "config.json", config_json(ends))
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20}
    write_json(
        folder / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ids["<|endoftext|>"]} | sampling
    )


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_gguf(params: Arrays, folder: Path) -> None:
    """Writes model-nvfp4.gguf, which carries its tokenizer and chat template, and config.json beside it."""
    writer = gguf.GGUFWriter(folder / "model-nvfp4.gguf", "flint")
    writer.add_name("Flint tiny")
    writer.add_file_type(FILE_NVFP4)
    add_tokenizer(writer)
    for name, data, kind in gguf_tensors(params):
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_configs(folder)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The vocabulary and merges as GGUF keeps them, and tokenizer.json whole, since its word rule has no GGUF name."""
    text = (CHECKPOINT / "tokenizer.json").read_text()
    ids = load_tokenizer().get_vocab()
    kinds = {**dict.fromkeys(SPECIAL, gguf.TokenType.CONTROL), **dict.fromkeys(TAGS, gguf.TokenType.USER_DEFINED)}
    vocabulary = sorted(ids, key=lambda token: ids[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("firesteel")
    writer.add_token_list(vocabulary)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in json.loads(text)["model"]["merges"]])
    writer.add_string("tokenizer.huggingface.json", text)
    writer.add_eos_token_id(ids["<|endoftext|>"])
    writer.add_eot_token_id(ids["<|user|>"])
    writer.add_uint32("tokenizer.ggml.eom_token_id", ids["<|observation|>"])
    writer.add_pad_token_id(ids["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((CHECKPOINT / "chat_template.jinja").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("params", type=Path, help="params.npz of a training run")
    params = dict(np.load(parser.parse_args().params))
    NVFP4_FOLDER.mkdir(exist_ok=True)
    write_safetensors(params, CHECKPOINT)
    write_gguf(params, NVFP4_FOLDER)


if __name__ == "__main__":
    main()
