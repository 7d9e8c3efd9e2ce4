"""The tiny model's architecture: Inkling's, small enough to embed and deep enough to look things up."""

from typing import Any

from checkpoints.training.inkling.tokenizer import KEPT_VOCAB_SIZE, VOCAB_SIZE, token_id
from modeling.inkling.config import FULL, SLIDING, InklingConfig, derived_layer_types
from serve.text import inkling_tokens as names

HIDDEN, LAYERS = 128, 7  # one full layer, the sixth, as in the published pattern
# Depths 0 and 2 look everywhere, 1 and 3 into the window.
DEPTHS = (FULL, SLIDING, FULL, SLIDING)
# (out, in) of the vision tower's layers: 2 x 2, 2 x 2 and 2 x 2 pixels, then the two times.
VISION = ((32, 12), (64, 128), (128, 256), (HIDDEN, 256))


def sliding_ids(kinds: tuple[str, ...]) -> list[int]:
    """`local_layer_ids` of these layers."""
    return [i for i, kind in enumerate(kinds) if kind == SLIDING]


def config_json() -> dict[str, Any]:
    """config.json, in the released spelling."""
    return {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "eos_token_id": token_id(names.END_TURN),
        "image_token_id": token_id(names.PLACEHOLDERS["image"]),
        "audio_token_id": token_id(names.PLACEHOLDERS["audio"]),
        "image_bos_token_id": token_id(names.IMAGE),
        "audio_bos_token_id": token_id(names.AUDIO),
        "audio_end_token_id": token_id(names.AUDIO_END),
        "text_config": {
            "model_max_length": 4096,
            "torch_dtype": "bfloat16",
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "vocab_size": VOCAB_SIZE,
            "unpadded_vocab_size": KEPT_VOCAB_SIZE,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "sliding_window_size": 32,
            "d_rel": 16,
            "rel_extent": 128,
            "q_bias": False,
            "o_bias": False,
            "log_scaling_n_floor": 256,
            "log_scaling_alpha": 0.1,
            "rms_norm_eps": 1e-6,
            "use_embed_norm": True,
            "local_layer_ids": sliding_ids(derived_layer_types(LAYERS)),
            "dense_mlp_idx": 2,
            "use_sconv": True,
            "sconv_kernel_size": 4,
            "logits_mup_width_multiplier": 3.0,
            "final_logit_softcapping": None,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "shared_expert_sink": True,
            "dense_intermediate_size": 192,
            "intermediate_size": 32,
            "route_scale": 4.0,
            "use_gate_bias": True,
            "norm_after_topk": True,
            "use_global_scale": True,
            "gate_activation": "sigmoid",
        },
        "audio_config": {
            "decoder_dmodel": HIDDEN,
            "n_mel_bins": 80,
            "mel_vocab_size": 16,
            "bias": False,
            "dmel_min_value": -7.0,
            "dmel_max_value": 2.0,
            "use_audio_norm": True,
            "audio_mode": "dmel",
        },
        "vision_config": {
            "vision_encoder_type": "hmlp",
            "decoder_dmodel": HIDDEN,
            "patch_size": 8,
            "temporal_patch_size": 2,
            "n_channels": 3,
            "n_layers": len(VISION),
            "use_vision_norm": True,
        },
        "mtp_config": {
            "num_nextn_predict_layers": len(DEPTHS),
            "local_layer_ids": sliding_ids(DEPTHS),
            "chain_hidden_post_norm": False,
        },
    }


def config() -> InklingConfig:
    """The same, parsed."""
    return InklingConfig.from_json(config_json())
