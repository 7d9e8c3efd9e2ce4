"""Writes a trained model in the released layouts: BF16, and NVFP4 with the routed experts packed from layer 3 on.

python -m checkpoints.training.inkling.export RUN/params.npz
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import deserialize
from safetensors.numpy import save_file

from checkpoints.training import nvfp4
from checkpoints.training.inkling.forward import cast, forward, is_float32, is_packed
from checkpoints.training.inkling.pack import held_out_batches
from checkpoints.training.inkling.shape import config, config_json
from checkpoints.training.inkling.tokenizer import CHECKPOINT, token_id, write_tokenizer_config
from checkpoints.training.inkling.train import rows_of
from serve.text import inkling_tokens as names

Arrays = dict[str, np.ndarray]
NVFP4_FOLDER = CHECKPOINT.parent / "inkling-tiny-nvfp4"
TEMPLATE = Path(__file__).parent / "chat_template.jinja"
FILES = ("model.safetensors", "mtp.safetensors")
# What these files hold, by the format's names of it.
DTYPES = {
    "BF16": ml_dtypes.bfloat16, "F32": np.float32, "U8": np.uint8, "I64": np.int64, "F8_E4M3": ml_dtypes.float8_e4m3fn,
}  # fmt: skip


def write_bf16(params: Arrays, folder: Path) -> None:
    """Writes the weights in BF16, the router's bias and scale in float32."""
    _write({name: _stored(name, value) for name, value in params.items()}, folder)


def write_nvfp4(params: Arrays, folder: Path, largest: Mapping[str, Any]) -> None:
    """Writes the weights with routed experts packed, quantised from the BF16 ones; and what says so.

    Args:
        largest: by the name of a stack of experts, the largest magnitude that enters it.
    """
    tensors: Arrays = {}
    for name, value in params.items():
        stored = _stored(name, value)
        if not is_packed(name):
            tensors[name] = stored
            continue
        codes, scales, unit = nvfp4.quantize(stored.astype(np.float32))
        tensors[name] = codes[..., 0::2] | codes[..., 1::2] << 4  # the even column in the low nibble
        tensors[f"{name}.scale"] = scales.view(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}.scale2"] = unit
        tensors[f"{name}.input_amax"] = np.asarray(largest[name], ml_dtypes.bfloat16).reshape(1)
        tensors[f"{name}.original_shape"] = np.array(value.shape, np.int64)
    _write(tensors, folder)
    plain = sorted({name.removesuffix(".weight").removesuffix("_weight") for name in params if not is_packed(name)})
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "none",
        "group_size": nvfp4.BLOCK,
        "exclude_modules": [name for name in plain if not name.startswith("model.mtp.")],  # as released: unlisted, BF16
    }
    write_json(folder / "hf_quant_config.json", {"quantization": quantization})


def _stored(name: str, value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value, np.float32 if is_float32(name) else ml_dtypes.bfloat16)


def _write(tensors: Arrays, folder: Path) -> None:
    depths = {name: value for name, value in tensors.items() if name.startswith("model.mtp.")}
    trunk = {name: value for name, value in tensors.items() if name not in depths}
    for file, part in zip(FILES, (trunk, depths), strict=True):
        save_file(part, folder / file, metadata={"format": "pt"})


def read(folder: Path) -> Arrays:
    """The training parameters (float32, dequantised) in a checkpoint of either format."""
    tensors: Arrays = {}
    for file in FILES:
        for name, found in deserialize((folder / file).read_bytes()):
            tensors[name] = np.frombuffer(found["data"], DTYPES[found["dtype"]]).reshape(found["shape"])
    params: Arrays = {}
    for name, value in tensors.items():
        if f"{name}.scale2" in tensors:
            codes = np.stack([value & 15, value >> 4], -1).reshape(*value.shape[:-1], -1)
            scales = tensors[f"{name}.scale"].view(np.uint8)
            params[name] = nvfp4.dequantize(codes, scales, tensors[f"{name}.scale2"])
        elif not name.endswith((".scale", ".scale2", ".input_amax", ".original_shape")):
            params[name] = value.astype(np.float32)
    return params


def calibrate(params: Arrays, per_kind: int = 1, rows: int = 4) -> Arrays:
    """The largest magnitude that enters each stack of experts on some held-out conversations."""
    weights = cast({name: jnp.asarray(value) for name, value in params.items()}, jnp.float32)
    run = jax.jit(lambda batch: forward(weights, batch, config()).largest)
    found: Arrays = {}
    for packed in held_out_batches(per_kind, rows, 1024):
        for name, value in run(rows_of(packed)).items():
            found[name] = np.maximum(found.get(name, 0), np.asarray(value))
    return found


def write_json(path: Path, value: dict) -> None:
    """Indented, with a line break at the end."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_settings(folder: Path) -> None:
    """Writes everything but weights and tokenizer.json."""
    end, padding = token_id(names.END_TURN), token_id("<|endoftext|>")
    write_json(folder / "config.json", config_json())
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20}
    write_json(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": padding} | sampling)
    vision = config_json()["vision_config"]
    image = {
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "rescale_image_frac": None,
        "rescale_image_max_upscaled_long_edge": 2048,
        "resample": 1,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    write_json(folder / "processor_config.json", {"image_processor": image})
    write_tokenizer_config(folder)
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("params", type=Path, help="params.npz of a training run")
    params = dict(np.load(parser.parse_args().params))
    NVFP4_FOLDER.mkdir(exist_ok=True)
    write_bf16(params, CHECKPOINT)
    write_nvfp4(params, NVFP4_FOLDER, calibrate(params))
    shutil.copyfile(CHECKPOINT / "tokenizer.json", NVFP4_FOLDER / "tokenizer.json")
    for folder in (CHECKPOINT, NVFP4_FOLDER):
        write_settings(folder)


if __name__ == "__main__":
    main()
