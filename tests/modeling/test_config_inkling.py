"""Inkling's config.json: both spellings, the published sizes, and faults named.

`inkling_resaved.json` holds what transformers 5.23 writes when it loads and saves a released config again: those of two
of the fixtures, and the published 975B model's.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from modeling.errors import CheckpointError
from modeling.inkling.config import (
    FULL,
    INKLING_SMALL,
    SLIDING,
    AudioConfig,
    InklingConfig,
    MTPConfig,
    VisionConfig,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"
RESAVED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "inkling_resaved.json").read_text())
RELEASED: dict[str, dict[str, Any]] = {
    name: json.loads((FIXTURES / f"inkling-{name}" / "config.json").read_text()) for name in ("mm-bf16", "mtp")
}


def published() -> dict[str, Any]:
    """The published 975B model's file, from the released table of fields."""
    text = dict(
        model_max_length=1048576, torch_dtype="bfloat16", hidden_size=6144, num_hidden_layers=66, vocab_size=201024,
        unpadded_vocab_size=200058, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
        swa_num_attention_heads=64, swa_num_key_value_heads=16, swa_head_dim=128, sliding_window_size=512, d_rel=16,
        rel_extent=1024, q_bias=False, o_bias=False, log_scaling_n_floor=128000, log_scaling_alpha=0.1,
        rms_norm_eps=1e-6, use_embed_norm=True, local_layer_ids=[i for i in range(66) if (i + 1) % 6], dense_mlp_idx=2,
        use_sconv=True, sconv_kernel_size=4, logits_mup_width_multiplier=24.0, final_logit_softcapping=None,
        n_routed_experts=256, num_experts_per_tok=6, n_shared_experts=2, shared_expert_sink=True,
        dense_intermediate_size=24576, intermediate_size=3072, route_scale=8.0, use_gate_bias=True,
        norm_after_topk=True, use_global_scale=True, gate_activation="sigmoid",
    )  # fmt: skip
    return dict(
        architectures=["InklingForConditionalGeneration"],
        model_type="inkling_mm_model",
        eos_token_id=200006,
        text_config=text,
        mtp_config=dict(
            num_nextn_predict_layers=8, local_layer_ids=[0, 2, 4, 5, 6, 7], chain_hidden_post_norm=False
        ),
        audio_config=dict(
            decoder_dmodel=6144, n_mel_bins=80, mel_vocab_size=16, bias=False, dmel_min_value=-7.0,
            dmel_max_value=2.0, use_audio_norm=True, audio_mode="dmel",
        ),
        vision_config=dict(
            vision_encoder_type="hmlp", decoder_dmodel=6144, patch_size=40, temporal_patch_size=2, n_channels=3,
            n_layers=4, use_vision_norm=True,
        ),
    )  # fmt: skip


def changed(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with fields of `text_config` changed, or of another block by `block__field`; ... removes one."""
    raw = json.loads(json.dumps(raw))
    for name, value in changes.items():
        block, _, field = name.rpartition("__")
        target = raw if block == "top" else raw[block or "text_config"]
        target.pop(field, None)
        if value is not ...:
            target[field] = value
    return raw


def read(name: str = "mm-bf16", **changes: Any) -> InklingConfig:
    return InklingConfig.from_json(changed(RELEASED[name], **changes))


def test_class_defaults_are_the_published_models():
    assert InklingConfig.from_json(published()) == InklingConfig()
    small = dict(
        hidden_size=4096, num_hidden_layers=42, num_attention_heads=32, swa_num_attention_heads=32,
        swa_num_key_value_heads=8, logits_mup_width_multiplier=16.0, dense_intermediate_size=16384,
        intermediate_size=2048, local_layer_ids=[i for i in range(42) if (i + 1) % 6],
        audio_config__decoder_dmodel=4096, vision_config__decoder_dmodel=4096,
    )  # fmt: skip
    assert InklingConfig.from_json(changed(published(), **small)) == INKLING_SMALL


def test_published_pattern():
    config = InklingConfig()
    assert [i for i, kind in enumerate(config.layer_types) if kind == FULL] == [
        5,
        11,
        17,
        23,
        29,
        35,
        41,
        47,
        53,
        59,
        65,
    ]
    assert [i for i, kind in enumerate(INKLING_SMALL.layer_types) if kind == FULL] == [5, 11, 17, 23, 29, 35, 41]
    assert [i for i, sparse in enumerate(config.sparse_layers) if not sparse] == [0, 1]
    assert config.mtp is not None and [i for i, kind in enumerate(config.mtp.layer_types) if kind == FULL] == [1, 3]
    assert (config.window(4), config.window(5)) == (512, None)
    assert (config.extent(SLIDING), config.extent(FULL)) == (512, 1024)
    assert (config.num_kv_heads(SLIDING), config.num_kv_heads(FULL)) == (16, 8)
    assert INKLING_SMALL.num_heads(SLIDING) == 32 and config.head_dim_of(FULL) == 128


def test_what_layers_keep():
    config = read("mtp")
    sliding, full = config.cache_layers[0], config.cache_layers[5]
    assert (sliding.sliding, sliding.num_kv_heads, sliding.conv_channels) == (True, 4, (128, 128, 64, 64))
    assert (full.sliding, full.num_kv_heads, full.conv_channels) == (False, 2, (64, 64, 64, 64))
    assert [layer.sliding for layer in config.draft_cache_layers] == [True, False, True, False]
    assert read("mm-bf16").draft_cache_layers == ()


def test_ck16_resaved_by_transformers():
    assert InklingConfig.from_json(RESAVED["mm-bf16"]) == read("mm-bf16")
    assert InklingConfig.from_json(RESAVED["published"]) == InklingConfig()
    # A text model gets towers when it is saved again, which its checkpoint still lacks.
    text = dataclasses.replace(InklingConfig.from_json(RESAVED["mtp"]), vision=None, audio=None)
    assert text == read("mtp")
    assert text.num_kv_heads(SLIDING) == 4 and text.num_kv_heads(FULL) == 2


@pytest.mark.parametrize(
    "changes",
    [
        dict(sconv_kernel_size=..., conv_kernel_size=4),
        dict(model_max_length=..., max_position_embeddings=131072),
        dict(dense_mlp_idx=..., mlp_layer_types=["dense"] * 2 + ["sparse"] * 5),
        dict(local_layer_ids=..., layer_types=["hybrid_sliding"] * 5 + ["hybrid", "hybrid_sliding"]),
        dict(local_layer_ids=..., layer_types=[SLIDING] * 5 + [FULL, SLIDING]),
        dict(layer_types=["hybrid_sliding"] * 5 + ["hybrid", "hybrid_sliding"]),
        dict(dense_intermediate_size=..., intermediate_size=128, moe_intermediate_size=32),
        dict(vision_config__n_layers=..., vision_config__num_hidden_layers=4),
        dict(vision_config__n_channels=..., vision_config__num_channels=3),
        dict(vision_config__decoder_dmodel=..., vision_config__text_hidden_size=64),
        dict(audio_config__decoder_dmodel=..., audio_config__text_hidden_size=64),
        dict(audio_config__dmel_min_value=..., audio_config__dmel_max_value=...),
        dict(use_embed_norm=..., rms_norm_eps=..., log_scaling_alpha=...),
    ],
)
def test_ck16_either_spelling_of_a_field(changes):
    assert read(**changes) == read()


def test_ck16_drafting_depths_in_every_place():
    block = RELEASED["mtp"]["mtp_config"]
    expected = MTPConfig((SLIDING, FULL, SLIDING, FULL))
    assert read("mtp").mtp == expected
    assert read("mtp", top__mtp_config=..., mtp_config=block).mtp == expected
    flat = dict(num_mtp_layers=4, mtp_local_layer_ids=[0, 2], chain_hidden_post_norm=False)
    assert read("mtp", top__mtp_config=..., **flat).mtp == expected
    assert read("mtp", **flat).mtp == expected
    assert read("mtp", mtp_config__num_nextn_predict_layers=..., mtp_config__n_layers=4).mtp == expected
    assert read("mtp", top__mtp_config=...).mtp is None
    assert read("mtp", mtp_config__num_nextn_predict_layers=0, mtp_config__local_layer_ids=[]).mtp is None
    cut = read("mtp", mtp_config__num_nextn_predict_layers=1)  # the list still names depth 2
    assert cut.mtp == MTPConfig((SLIDING,))
    with pytest.raises(CheckpointError, match="disagree"):
        read("mtp", **flat | dict(num_mtp_layers=3))


def test_ck16_unknown_keys_of_every_block_are_reported(caplog):
    changes: dict[str, Any] = dict(shiny=1, top__new=2, vision_config__bright=3, audio_config__loud=4)
    with caplog.at_level(logging.WARNING):
        read(**changes)
    assert "audio_config.loud" in caplog.text and "vision_config.bright" in caplog.text
    assert "new" in caplog.text and "text_config.shiny" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for raw in [*RESAVED.values(), *RELEASED.values(), published()]:
            InklingConfig.from_json(raw)
    assert not caplog.text


def test_ck09_the_nested_tie_word_embeddings_governs():
    assert read(top__tie_word_embeddings=True, tie_word_embeddings=False) == read()
    with pytest.raises(CheckpointError, match=r"text_config\.tie_word_embeddings"):
        read(tie_word_embeddings=True)


def test_towers_and_their_tokens():
    config = read()
    assert config.vision == VisionConfig(patch_size=8) and config.audio == AudioConfig()
    assert (config.image_token_id, config.audio_token_id) == (509, 508)
    assert config.image_bos_token_id is None  # the published id, which a vocabulary of 512 does not have
    text = read(top__vision_config=..., top__audio_config=...)
    assert text.vision is None and text.audio is None and text.image_token_id is None and text.audio_token_id is None
    without = changed(published(), top__image_token_id=...)
    assert InklingConfig.from_json(without).image_token_id == 200054


def test_optional_fields():
    assert read(unpadded_vocab_size=None).kept_vocab_size == 512
    assert read().kept_vocab_size == 500
    assert read(log_scaling_n_floor=None).log_scaling_n_floor is None
    assert read(top__eos_token_id=[1, 2]).eos_token_ids == (1, 2)
    assert read(top__eos_token_id=...).eos_token_ids == ()


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(top__text_config=...), "no usable text_config"),
        (dict(top__text_config=3), "no usable text_config"),
        (dict(hidden_size=...), "text_config.hidden_size is missing"),
        (dict(d_rel="4"), "text_config.d_rel must be an integer"),
        (dict(head_dim=2**40), "head_dim = 1.1"),
        (dict(num_hidden_layers=10**9), "num_hidden_layers = 1.000e.09"),
        (dict(num_key_value_heads=3), "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        (dict(swa_num_key_value_heads=5), "swa_num_attention_heads 8 is not a multiple"),
        (dict(local_layer_ids=[0, 7]), "local_layer_ids names layers .7. outside 0..6"),
        (dict(layer_types=["hybrid"] * 7), "disagree about which layers slide"),
        (dict(local_layer_ids=..., layer_types=["hybrid"] * 6), "layer_types has 6 entries"),
        (dict(local_layer_ids=..., layer_types=["linear"] * 7), "not 'linear'"),
        (dict(dense_mlp_idx=...), "dense_mlp_idx is missing"),
        (dict(dense_mlp_idx=8), "dense_mlp_idx = 8"),
        (dict(mlp_layer_types=["dense"] * 7), "mlp_layer_types and dense_mlp_idx = 2 disagree"),
        (dict(dense_mlp_idx=..., mlp_layer_types=["moe"] * 7), "not 'moe'"),
        (dict(dense_intermediate_size=...), "moe_intermediate_size is missing"),
        (dict(moe_intermediate_size=64), "contradict intermediate_size"),
        (dict(conv_kernel_size=3), "disagree"),
        (dict(unpadded_vocab_size=513), "unpadded_vocab_size 513 exceeds vocab_size 512"),
        (dict(num_experts_per_tok=17), "exceeds num_experts"),
        (dict(sliding_window_size=0), "sliding_window"),
        (dict(log_scaling_n_floor=0), "log_scaling_n_floor"),
        (dict(logits_mup_width_multiplier=0), "logits_mup_width_multiplier"),
        (dict(route_scale=...), "route_scale is missing"),
        (dict(q_bias=True), "q_bias = True is not supported"),
        (dict(use_sconv=False), "use_sconv"),
        (dict(shared_expert_sink=False), "shared_expert_sink"),
        (dict(norm_after_topk=False), "norm_after_topk"),
        (dict(gate_activation="softmax"), "gate_activation"),
        (dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
        (dict(inference_moe_w13_interleaved=False), "inference_moe_w13_interleaved"),
        (dict(v_head_dim=64), "v_head_dim"),
        (dict(hidden_act="gelu"), "hidden_act"),
        (dict(mtp_hidden_states_first=False), "mtp_hidden_states_first"),
        (dict(top__eos_token_id=512), "eos_token_id"),
        (dict(top__image_token_id=512), "image_token_id 512 is outside"),
        (dict(top__audio_token_id=-1), "audio_token_id -1"),
        (dict(vision_config__vision_encoder_type="vit"), "vision_config.vision_encoder_type = 'vit'"),
        (dict(vision_config__decoder_dmodel=65), "vision_config.decoder_dmodel = 65"),
        (dict(vision_config__patch_size=0), "vision_config must hold positive sizes"),
        (dict(audio_config__audio_mode="wave"), "audio_config.audio_mode"),
        (dict(audio_config__dmel_max_value=-8), "must be below dmel_max_value"),
        (dict(audio_config__mel_vocab_size=...), "audio_config.mel_vocab_size is missing"),
        (dict(audio_config__mel_vocab_size=257), "mel_vocab_size 257 exceeds 256"),
        (dict(log_scaling_n_floor=2**40), "log_scaling_n_floor must be null or in 1"),
        (dict(d_rel=float("nan")), "text_config.d_rel must be an integer, not nan"),  # NaN differs from itself
        (dict(top__image_token_id=7, top__audio_token_id=7), "image_token_id and audio_token_id are both 7"),
    ],
)
def test_faults_are_named(changes, words):
    with pytest.raises(CheckpointError, match=words):
        read(**changes)


@pytest.mark.parametrize("own", [dict(swa_num_key_value_heads=8), dict(local_extent=16), dict(head_dim=64)])
def test_depths_with_attention_of_their_own_are_refused(own):
    with pytest.raises(CheckpointError, match=rf"mtp_config\.{next(iter(own))}"):
        read("mtp", **{f"mtp_config__{name}": value for name, value in own.items()})
    read("mtp", mtp_config__swa_num_key_value_heads=4, mtp_config__local_extent=8)  # the trunk's, said again


def test_all_faults_come_in_one_message():
    with pytest.raises(CheckpointError) as caught:
        read(hidden_size=..., q_bias=True, audio_config__bias=True, top__eos_token_id="x")
    for part in ("text_config.hidden_size", "q_bias", "audio_config.bias", "eos_token_id"):
        assert part in str(caught.value)
