"""The tiny model's architecture: Flint's, small enough to embed and deep enough to look things up."""

from typing import Any

from checkpoints.training.tokenizer import VOCAB_SIZE
from modeling.flint.config import FlintConfig, derived_layer_types

LAYERS = 8  # full attention in layers 0, 1, 5 and 7: two layers that look up, each after layers that look around


def config_json(eos_token_ids: list[int] | None = None) -> dict[str, Any]:
    """config.json, in the released spelling."""
    layer_types = derived_layer_types(LAYERS)
    return {
        "architectures": ["FlintForCausalLM"],
        "model_type": "flint",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "router_score_function": "sigmoid",
        "mlp_only_layers": [0, 1],
        "decoder_sparse_step": 1,
        "layer_types": list(layer_types),
        "no_rope_layer_indices": [i for i, kind in enumerate(layer_types) if kind == "full_attention"],
        "sliding_window": 33,
        "use_sliding_window": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": eos_token_ids,
    }


def config() -> FlintConfig:
    """The same, parsed."""
    return FlintConfig.from_json(config_json())
