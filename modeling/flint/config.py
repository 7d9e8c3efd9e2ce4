"""Flint's architecture, read from a checkpoint's `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from modeling.config_reader import MAX_LAYERS, ConfigReader
from modeling.errors import CheckpointError
from modeling.layer_shape import LayerShape

FULL, SLIDING = "full_attention", "sliding_attention"

# Keys that change nothing at inference, so that a key outside both lists can be reported as unknown.
_IGNORED_KEYS: frozenset[str] = frozenset(
    "architectures attention_dropout bos_token_id dtype eos_token_id head_dtype initializer_range model_type "
    "output_router_logits pad_token_id quantization_config router_aux_loss_coef torch_dtype transformers_version "
    "use_cache auto_map".split()
)


@dataclasses.dataclass(frozen=True)
class FlintConfig:
    """Everything that shapes a Flint model. Defaults are the published 40B model's.

    Attributes:
        layer_types: "full_attention" or "sliding_attention" a layer. Full layers carry no positions (NoPE), sliding
            layers rotate q and k (RoPE): the two always go together.
        sparse_layers: whether a layer's MLP is a mixture of experts (True) or dense (False).
        sliding_window: keys a sliding layer's query sees, itself included; None switches the window off.
        eos_token_ids: end tokens named by the config; `generation_config.json` may name more.
    """

    vocab_size: int = 150144
    hidden_size: int = 2048
    num_hidden_layers: int = 49
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = 128
    intermediate_size: int = 6144
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 1024
    num_experts: int = 256
    num_experts_per_tok: int = 6
    norm_topk_prob: bool = True
    layer_types: tuple[str, ...] = ()
    sparse_layers: tuple[bool, ...] = ()
    sliding_window: int | None = 513
    rope_theta: float = 10000.0
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-6
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        # A config made in Python may leave the patterns out; derive them as for a file without them.
        n = self.num_hidden_layers
        if not self.layer_types:
            object.__setattr__(self, "layer_types", derived_layer_types(n))
        if not self.sparse_layers:
            object.__setattr__(self, "sparse_layers", tuple(i not in (0, 1) for i in range(n)))
        problems = list(_problems(self))
        if problems:
            raise CheckpointError("config.json does not describe a Flint model:\n  " + "\n  ".join(problems))

    @property
    def kept_vocab_size(self) -> int:
        """Columns of the logits: the vocabulary has no padding."""
        return self.vocab_size

    @property
    def conv_kernel_size(self) -> int:
        """1: no short convolutions."""
        return 1

    @property
    def draft_cache_layers(self) -> tuple[LayerShape, ...]:
        """No drafting depths."""
        return ()

    @property
    def cache_layers(self) -> tuple[LayerShape, ...]:
        """What each layer keeps of the tokens it has seen."""
        return tuple(LayerShape(kind == SLIDING, self.num_key_value_heads, self.head_dim) for kind in self.layer_types)

    def window(self, layer: int) -> int | None:
        """Keys visible to a query of this layer, itself included; None means all before it."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> FlintConfig:
        """Reads the parsed `config.json` of a released or re-saved checkpoint.

        Raises:
            CheckpointError: a field is missing, ill-typed, unsupported, or two fields disagree; all faults at once.
        """
        return _read(raw)


def derived_layer_types(num_hidden_layers: int) -> tuple[str, ...]:
    """The published pattern: full at 0, 1, every i % 4 == 1, and the last layer."""
    last = num_hidden_layers - 1
    return tuple(FULL if i < 2 or i % 4 == 1 or i == last else SLIDING for i in range(num_hidden_layers))


def _problems(c: FlintConfig):
    for name in (
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
        "moe_intermediate_size shared_expert_intermediate_size num_experts num_experts_per_tok max_position_embeddings"
    ).split():
        if getattr(c, name) < 1:
            yield f"{name} must be positive, not {getattr(c, name)}"
    if c.num_key_value_heads > 0 and c.num_attention_heads % c.num_key_value_heads:
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
    if c.head_dim % 2:
        yield f"head_dim {c.head_dim} must be even: RoPE pairs dimension d with d + head_dim/2"
    if c.num_experts_per_tok > c.num_experts:
        yield f"num_experts_per_tok {c.num_experts_per_tok} exceeds num_experts {c.num_experts}"
    if c.sliding_window is not None and c.sliding_window < 1:
        yield f"sliding_window must be at least 1 (it counts the token itself), not {c.sliding_window}"
    if len(c.layer_types) != c.num_hidden_layers:
        yield f"layer_types has {len(c.layer_types)} entries, num_hidden_layers is {c.num_hidden_layers}"
    if len(c.sparse_layers) != c.num_hidden_layers:
        yield f"sparse_layers has {len(c.sparse_layers)} entries, num_hidden_layers is {c.num_hidden_layers}"
    if unknown := sorted(set(c.layer_types) - {FULL, SLIDING}):
        yield f"layer_types may hold {FULL!r} and {SLIDING!r}, not {', '.join(map(repr, unknown))}"
    if c.max_position_embeddings < 2:
        yield f"max_position_embeddings {c.max_position_embeddings} leaves no room for a prompt and an answer"
    if not c.rope_theta > 0:
        yield f"rope_theta must be positive, not {c.rope_theta}"
    if not c.rms_norm_eps > 0:
        yield f"rms_norm_eps must be positive, not {c.rms_norm_eps}"


def _read(raw: Mapping[str, Any]) -> FlintConfig:
    reader = ConfigReader(raw, "Flint", _IGNORED_KEYS)
    # The sizes have no sensible default: a file without one is not a config of this family.
    sizes = {
        name: reader.size(name)
        for name in "vocab_size hidden_size num_attention_heads num_key_value_heads intermediate_size "
        "moe_intermediate_size shared_expert_intermediate_size num_experts num_experts_per_tok".split()
    }
    num_layers = reader.size("num_hidden_layers", limit=MAX_LAYERS)
    window = reader.field("sliding_window", int, default=FlintConfig.sliding_window)
    if not reader.field("use_sliding_window", bool, default=True):
        window = None
    values: dict[str, Any] = dict(
        sizes,
        num_hidden_layers=num_layers,
        head_dim=reader.size("head_dim", FlintConfig.head_dim),
        norm_topk_prob=reader.field("norm_topk_prob", bool, default=True),
        layer_types=_layer_types(reader, num_layers),
        sparse_layers=_sparse_layers(reader, num_layers),
        sliding_window=window,
        rope_theta=_rope_theta(reader),
        max_position_embeddings=reader.size("max_position_embeddings", FlintConfig.max_position_embeddings),
        rms_norm_eps=reader.field("rms_norm_eps", float, default=1e-6),
        eos_token_ids=reader.token_ids("eos_token_id", sizes["vocab_size"]),
    )
    reader.must_be(router_score_function="sigmoid", hidden_act="silu", attention_bias=False, tie_word_embeddings=False)
    reader.finish()
    return FlintConfig(**values)


def _layer_types(reader: ConfigReader, n: int) -> tuple[str, ...]:
    given = reader.strings("layer_types")
    layer_types = tuple(given) if given is not None else derived_layer_types(n)
    no_rope = reader.indices("no_rope_layer_indices", n)
    if no_rope is not None:
        full = {i for i, kind in enumerate(layer_types) if kind == FULL}
        if full != set(no_rope):
            reader.faults.append(
                "layer_types and no_rope_layer_indices disagree (full-attention layers are the ones without RoPE) "
                f"about layers {sorted(full ^ set(no_rope))}"
            )
    return layer_types


def _sparse_layers(reader: ConfigReader, n: int) -> tuple[bool, ...]:
    dense = reader.indices("mlp_only_layers", n)
    dense = {0, 1} if dense is None else set(dense)
    step = reader.field("decoder_sparse_step", int, default=1)
    if step < 1:
        reader.fault("decoder_sparse_step", f"must be at least 1, not {step}")
        step = 1
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(n))


def _rope_theta(reader: ConfigReader) -> float:
    legacy = reader.field("rope_theta", float)
    rope = reader.field("rope_parameters", dict) or {}
    scaling = reader.field("rope_scaling", dict) or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        reader.faults.append(f"rope_type {kind!r} is not supported: Flint's is 'default' (no scaling)")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        reader.faults.append("partial_rotary_factor is not supported: all of head_dim rotates in Flint")
    theta = rope.get("rope_theta", legacy)
    if legacy is not None and theta != legacy:
        reader.faults.append(f"rope_theta {legacy} and rope_parameters.rope_theta {theta} disagree")
    if theta is not None and not (isinstance(theta, int | float) and 0 < theta < 1e30):
        reader.faults.append(f"rope_theta must be a positive number, not {theta!r:.60}")
        theta = None
    return float(theta if theta is not None else FlintConfig.rope_theta)
