"""config.json: every spelling, derived patterns, and faults named."""

import dataclasses
import json
import logging

import pytest
from tiny import SIZES

from modeling.config import load_config
from modeling.errors import CheckpointError
from modeling.flint.config import FULL, SLIDING, FlintConfig

RELEASED = {k: v for k, v in SIZES.items() if k != "num_hidden_layers"} | dict(model_type="flint", num_hidden_layers=8)


def read(**changes) -> FlintConfig:
    raw = RELEASED | changes
    return FlintConfig.from_json({k: v for k, v in raw.items() if v is not ...})


def test_published_layer_pattern():
    config = FlintConfig()
    full = [i for i, kind in enumerate(config.layer_types) if kind == FULL]
    assert full == [0, 1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 48]
    assert [i for i, sparse in enumerate(config.sparse_layers) if not sparse] == [0, 1]
    assert config.window(2) == 513
    assert config.window(0) is None


def test_patterns_are_derived_where_absent_and_read_where_given():
    assert read().layer_types == (FULL, FULL, SLIDING, SLIDING, SLIDING, FULL, SLIDING, FULL)
    given = [SLIDING] * 7 + [FULL]
    assert read(layer_types=given).layer_types == tuple(given)
    assert read(mlp_only_layers=[3]).sparse_layers == (True, True, True, False, True, True, True, True)
    assert read(mlp_only_layers=[], decoder_sparse_step=2).sparse_layers == (False, True) * 4


def test_config_without_vllm_fields_has_nope_full_layers_sigmoid_and_window():
    config = read(no_rope_layer_indices=..., router_score_function=..., use_sliding_window=...)
    assert config.layer_types[0] == FULL
    assert config.sliding_window == 9


def test_window_can_be_switched_off():
    assert read(use_sliding_window=False).window(2) is None


def test_rope_theta_in_both_spellings():
    assert read(rope_theta=5e5).rope_theta == 5e5
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 7}).rope_theta == 7.0
    assert read().rope_theta == 10000.0
    with pytest.raises(CheckpointError, match="disagree"):
        read(rope_theta=1e4, rope_parameters={"rope_theta": 2e4})


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(no_rope_layer_indices=[0, 1, 5]), "disagree.*7"),
        (dict(layer_types=[FULL] * 3), "3 entries"),
        (dict(layer_types=["linear"] * 8), "'linear'"),
        (dict(mlp_only_layers=[8]), "outside 0..7"),
        (dict(num_key_value_heads=3), "multiple of num_key_value_heads"),
        (dict(hidden_size=...), "hidden_size is missing"),
        (dict(hidden_size="64"), "hidden_size must be an integer"),
        (dict(num_experts=True), "num_experts must be an integer"),
        (dict(num_experts_per_tok=9), "exceeds num_experts"),
        (dict(head_dim=31), "even"),
        (dict(sliding_window=0), "sliding_window"),
        (dict(rope_parameters={"rope_type": "yarn", "factor": 4}), "'yarn'"),
        (dict(rope_scaling={"type": "yarn", "factor": 4}), "'yarn'"),
        (dict(rope_scaling="yarn"), "rope_scaling must be an object"),
        (dict(num_hidden_layers="8", mlp_only_layers=[0]), "num_hidden_layers must be an integer"),
        (dict(num_hidden_layers=10**9), "num_hidden_layers = 1.000e.09"),
        (dict(num_experts=10**12), "num_experts = 1.000e.12"),
        (dict(layer_types=[[FULL]] * 8), "list of strings"),
        (dict(head_dim=2**62), "head_dim = 4.6"),
        (dict(rope_theta=10**400), "rope_theta must be a finite number"),
        (dict(rope_theta=float("inf")), "rope_theta must be a finite number"),
        (dict(rms_norm_eps=10**400), "rms_norm_eps must be a finite number"),
        (dict(max_position_embeddings=1), "max_position_embeddings"),
        (dict(eos_token_id=5.5), "eos_token_id"),
        (dict(eos_token_id=True), "eos_token_id"),
        (dict(eos_token_id=128), "eos_token_id"),
        (dict(router_score_function="softmax"), "softmax"),
        (dict(attention_bias=True), "attention_bias"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings"),
        (dict(hidden_act="gelu"), "gelu"),
        (dict(decoder_sparse_step=0), "decoder_sparse_step"),
        (dict(rms_norm_eps=0), "rms_norm_eps"),
        (dict(eos_token_id="x"), "eos_token_id"),
    ],
)
def test_faults_are_named(changes, words):
    with pytest.raises(CheckpointError, match=words):
        read(**changes)


def test_all_faults_come_in_one_message():
    with pytest.raises(CheckpointError) as caught:
        read(hidden_size=..., hidden_act="gelu", mlp_only_layers=[99])
    for part in ("hidden_size", "gelu", "99"):
        assert part in str(caught.value)


def test_unknown_keys_are_reported(caplog):
    with caplog.at_level(logging.WARNING):
        read(shiny_new_field=1)
    assert "shiny_new_field" in caplog.text


def test_eos_ids_may_be_one_several_or_none():
    assert read(eos_token_id=3).eos_token_ids == (3,)
    assert read(eos_token_id=[3, 4]).eos_token_ids == (3, 4)
    assert read(eos_token_id=None).eos_token_ids == ()


def test_config_file_faults(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "fl')
    with pytest.raises(CheckpointError, match="truncated"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": []}')
    with pytest.raises(CheckpointError, match="model_type"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="JSON object"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RELEASED | {"model_type": "llama"}))
    with pytest.raises(CheckpointError, match=r"'llama'.*flint"):
        load_config(tmp_path)


def test_config_is_hashable_and_frozen():
    config = FlintConfig()
    assert hash(config) == hash(FlintConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]
