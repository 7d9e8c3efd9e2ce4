"""Flint's architecture, read from a checkpoint's `config.json`."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

from modeling.errors import CheckpointError

log = logging.getLogger(__name__)

FULL, SLIDING = "full_attention", "sliding_attention"

# A damaged number must end in a sentence, not in a list of a billion layers.
MAX_LAYERS, MAX_SIZE = 1000, 1 << 24

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

    def window(self, layer: int) -> int | None:
        """Keys visible to a query of this layer, itself included; None means all before it."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> FlintConfig:
        """Reads the parsed `config.json` of a released or re-saved checkpoint.

        Raises:
            CheckpointError: a field is missing, ill-typed, unsupported, or two fields disagree; all faults at once.
        """
        return _Reader(raw).read()


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


_KIND_NAMES = {
    int: "an integer", float: "a finite number", bool: "true or false", list: "a list", dict: "an object"
}  # fmt: skip


class _Reader:
    """Reads fields one by one, notes which were used, and collects faults instead of stopping at the first."""

    def __init__(self, raw: Mapping[str, Any]):
        self.raw = raw
        self.used: set[str] = set(_IGNORED_KEYS)
        self.faults: list[str] = []

    def field(self, name: str, kind: type, default: Any = None, required: bool = False) -> Any:
        self.used.add(name)
        value = self.raw.get(name)
        if value is None:
            if required:
                self.faults.append(f"{name} is missing")
            return default
        numeric = kind in (int, float) and isinstance(value, bool)
        if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e30:
            value = float(value)
        if not isinstance(value, kind) or numeric or (kind is float and not math.isfinite(value)):
            self.faults.append(f"{name} must be {_KIND_NAMES[kind]}, not {value!r:.60}")
            return default
        return value

    def size(self, name: str, required: bool = False) -> int:
        """A dimension; 1 stands in for an unusable one."""
        value = self.field(name, int, 1 if required else getattr(FlintConfig, name), required)
        limit = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
        if value > limit:
            self.faults.append(f"{name} = {value:.3e} is beyond {limit}, which no checkpoint of this family has")
            return 1
        return value

    def must_be(self, name: str, supported: Any) -> None:
        self.used.add(name)
        value = self.raw.get(name, supported)
        if value != supported:
            self.faults.append(f"{name} = {value!r} is not supported: Flint has {supported!r}")

    def indices(self, name: str, n: int) -> list[int] | None:
        """A list of indices of the `n` layers, or None when absent."""
        value = self.field(name, list)
        if value is None:
            return None
        if bad := [i for i in value if type(i) is not int or not 0 <= i < n]:
            self.faults.append(f"{name} names layers {bad} outside 0..{n - 1}")
        return value

    def read(self) -> FlintConfig:
        # The sizes have no sensible default: a file without one is not a config of this family.
        sizes = {
            name: self.size(name, required=True)
            for name in "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
            "intermediate_size moe_intermediate_size shared_expert_intermediate_size num_experts "
            "num_experts_per_tok".split()
        }
        layer_types = self.layer_types(sizes["num_hidden_layers"])
        window = self.field("sliding_window", int, default=FlintConfig.sliding_window)
        if not self.field("use_sliding_window", bool, default=True):
            window = None
        values: dict[str, Any] = dict(
            sizes,
            head_dim=self.size("head_dim"),
            norm_topk_prob=self.field("norm_topk_prob", bool, default=True),
            layer_types=layer_types,
            sparse_layers=self.sparse_layers(sizes["num_hidden_layers"]),
            sliding_window=window,
            rope_theta=self.rope_theta(),
            max_position_embeddings=self.size("max_position_embeddings"),
            rms_norm_eps=self.field("rms_norm_eps", float, default=1e-6),
            eos_token_ids=self.eos_token_ids(),
        )
        for name, supported in dict(
            router_score_function="sigmoid", hidden_act="silu", attention_bias=False, tie_word_embeddings=False
        ).items():
            self.must_be(name, supported)
        if self.faults:
            raise CheckpointError("config.json cannot be used:\n  " + "\n  ".join(self.faults))
        if unknown := sorted(set(self.raw) - self.used):
            log.warning("config.json has keys that Flint does not know and that are ignored: %s", ", ".join(unknown))
        return FlintConfig(**values)

    def layer_types(self, n: int) -> tuple[str, ...]:
        given = self.field("layer_types", list)
        if given is not None and not all(isinstance(kind, str) for kind in given):
            self.faults.append(f"layer_types must be a list of strings, not {given!r}")
            given = None
        layer_types = tuple(given) if given is not None else derived_layer_types(n)
        no_rope = self.indices("no_rope_layer_indices", n)
        if no_rope is not None:
            full = {i for i, kind in enumerate(layer_types) if kind == FULL}
            if full != set(no_rope):
                self.faults.append(
                    "layer_types and no_rope_layer_indices disagree (full-attention layers are the ones without RoPE) "
                    f"about layers {sorted(full ^ set(no_rope))}"
                )
        return layer_types

    def sparse_layers(self, n: int) -> tuple[bool, ...]:
        dense = self.indices("mlp_only_layers", n)
        dense = {0, 1} if dense is None else set(dense)
        step = self.field("decoder_sparse_step", int, default=1)
        if step < 1:
            self.faults.append(f"decoder_sparse_step must be at least 1, not {step}")
            step = 1
        return tuple(i not in dense and (i + 1) % step == 0 for i in range(n))

    def rope_theta(self) -> float:
        legacy = self.field("rope_theta", float)
        rope = self.field("rope_parameters", dict) or {}
        scaling = self.field("rope_scaling", dict) or rope
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            self.faults.append(f"rope_type {kind!r} is not supported: Flint's is 'default' (no scaling)")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            self.faults.append("partial_rotary_factor is not supported: all of head_dim rotates in Flint")
        theta = rope.get("rope_theta", legacy)
        if legacy is not None and theta != legacy:
            self.faults.append(f"rope_theta {legacy} and rope_parameters.rope_theta {theta} disagree")
        if theta is not None and not (isinstance(theta, int | float) and 0 < theta < 1e30):
            self.faults.append(f"rope_theta must be a positive number, not {theta!r:.60}")
            theta = None
        return float(theta if theta is not None else FlintConfig.rope_theta)

    def eos_token_ids(self) -> tuple[int, ...]:
        value = self.raw.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        vocab_size = self.raw.get("vocab_size")
        if not all(type(i) is int and i >= 0 for i in ids) or (
            type(vocab_size) is int and max(ids, default=0) >= vocab_size
        ):
            self.faults.append(f"eos_token_id must be an id below vocab_size, a list of ids or null, not {value!r}")
            return ()
        return tuple(ids)
