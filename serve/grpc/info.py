"""What the server says about its model, itself and its load."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from serve.grpc.backend import Assembled
from serve.request import EngineStats


def model_facts(assembled: Assembled, served_model_name: str) -> dict[str, Any]:
    """Fields of GetModelInfoResponse that both protocols have, from the engine and the checkpoint's config.json."""
    engine, config = assembled.engine, read_config(assembled.model_dir)
    defaults = dict(assembled.generation_config)
    if defaults.get("top_k", 1) <= 0:  # no limit; gateways know only positive numbers
        del defaults["top_k"]
    return {
        "model_path": assembled.model_name,
        "max_context_length": engine.max_model_len,
        "vocab_size": engine.vocab_size,
        "supports_vision": assembled.media_format is not None and "image" in assembled.media_format.kinds,
        "served_model_name": served_model_name,
        "tokenizer_path": str(assembled.tokenizer_dir),
        "model_type": str(config.get("model_type") or ""),
        "architectures": config.get("architectures") or [],
        "eos_token_ids": engine.eos_token_ids,
        "pad_token_id": config.get("pad_token_id") or 0,
        "bos_token_id": config.get("bos_token_id") or 0,
        "max_req_input_len": engine.max_model_len - 1,
        "default_sampling_params_json": json.dumps(defaults) if defaults else "",
    }


def read_config(model_dir: Path) -> dict[str, Any]:
    """The checkpoint's config.json; empty where the format has none."""
    path = model_dir / "config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def loads(stats: EngineStats, pb: Any) -> Any:
    """The load of the one engine behind this server; `pb` is the protocol's module of messages."""
    load = pb.SchedulerLoad(
        num_running_reqs=stats.num_running,
        num_waiting_reqs=stats.num_waiting,
        num_total_reqs=stats.num_running + stats.num_waiting,
        token_usage=stats.kv_pages_used / max(stats.kv_pages_total, 1),
        utilization=stats.num_running / max(stats.num_slots, 1),
        max_running_requests=stats.num_slots,
    )
    return pb.GetLoadsResponse(
        timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
        version=importlib.metadata.version("firesteel"),
        dp_rank_count=1,
        loads=[load],
    )
