"""What a checkpoint says of its quantisation. Which tensors are packed is told by the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from modeling.config import read_json
from modeling.loading.faults import Faults
from modeling.loading.source import QUANTIZATION, Checkpoint

# ModelOpt's and compressed-tensors' names of the one that can be read. A producer need not be named.
_READ = ("nvfp4", "nvfp4-pack-quantized")
_WRITERS = ("modelopt", "compressed-tensors")  # say nothing of the format by themselves
_GROUP = 16


def check_quantization(checkpoint: Checkpoint, faults: Faults) -> None:
    """Notes a quantisation that is stated beside a safetensors checkpoint and that cannot be read."""
    for place, block in _blocks(checkpoint):
        stated = block.get("quant_algo") or block.get("format") or block.get("quant_method")
        if stated is not None and str(stated).lower() not in (*_READ, *_WRITERS):
            faults.add(f"{place} says that weights are quantised as {stated!r:.60}; NVFP4 and BF16 can be read")
        if block.get("group_size") not in (None, _GROUP):
            faults.add(f"{place} has group_size {block['group_size']!r:.60}; NVFP4 has {_GROUP} weights a block scale")


def _blocks(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, Any]]]:
    config = checkpoint.raw_config
    for name, raw in (("config.json", config), ("config.json, text_config", config.get("text_config"))):
        if isinstance(raw, dict) and isinstance(raw.get("quantization_config"), dict):
            yield name, raw["quantization_config"]
    file = checkpoint.config_folder / QUANTIZATION
    if file.is_file():
        block = read_json(file).get("quantization")
        yield QUANTIZATION, block if isinstance(block, dict) else {}
