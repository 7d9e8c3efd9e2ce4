"""Inkling's architecture, read from a checkpoint's `config.json` (spec section 1).

The file comes in two spellings: the released one, and the one that transformers writes when it saves a model again.
Both give equal configs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from modeling.config_reader import MAX_LAYERS, ConfigReader
from modeling.errors import CheckpointError
from modeling.layer_shape import LayerShape

FULL, SLIDING = "full_attention", "sliding_attention"

_KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING, FULL: FULL, SLIDING: SLIDING}

# Token ids of the published tokenizer, for files that do not name them.
IMAGE_TOKEN, AUDIO_TOKEN, IMAGE_BOS_TOKEN, AUDIO_BOS_TOKEN, AUDIO_END_TOKEN = 200054, 200053, 200005, 200020, 200043


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The picture tower: patches of `temporal_patch_size` x `patch_size` x `patch_size` pixels, one vector each."""

    patch_size: int = 40
    temporal_patch_size: int = 2
    num_channels: int = 3
    num_layers: int = 4


@dataclasses.dataclass(frozen=True)
class AudioConfig:
    """The sound tower: log-mel values between the two bounds, each put into one of `mel_vocab_size` bins."""

    num_mel_bins: int = 80
    mel_vocab_size: int = 16
    dmel_min_value: float = -7.0
    dmel_max_value: float = 2.0


@dataclasses.dataclass(frozen=True)
class MTPConfig:
    """The drafting depths, dense layers with the trunk's head counts.

    Attributes:
        layer_types: as `InklingConfig.layer_types`, one a depth.
        chain_hidden_post_norm: whether a depth's output is normalised before the head and the next depth.
    """

    layer_types: tuple[str, ...] = (SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, SLIDING, SLIDING)
    chain_hidden_post_norm: bool = False

    @property
    def num_layers(self) -> int:
        """Depths that the config describes; a checkpoint may hold fewer."""
        return len(self.layer_types)


@dataclasses.dataclass(frozen=True)
class InklingConfig:
    """Everything that shapes an Inkling model. Defaults are the published 975B model's; see also `INKLING_SMALL`.

    Attributes:
        vocab_size: rows of embedding and head. kept_vocab_size: those that are tokens, the rest being padding.
        num_attention_heads, num_key_value_heads, head_dim: of full layers. swa_*: of sliding layers.
        sliding_window: keys a sliding layer's query sees, itself included; also the reach of its position bias.
        d_rel: width of the position bias's projection. rel_extent: its reach in full layers, in tokens.
        log_scaling_n_floor: tokens after which full layers sharpen with the logarithm of the position; None: never.
        layer_types: "full_attention" or "sliding_attention" a layer.
        sparse_layers: whether a layer's MLP is a mixture of experts (True) or dense (False).
        logits_mup_width_multiplier: divides the logits.
        intermediate_size: width of dense MLPs. moe_intermediate_size: width of an expert, routed or shared.
        eos_token_ids: end tokens named by the config; `generation_config.json` may name more.
        vision, audio, mtp: None for a model without. Whether a checkpoint holds the weights is another matter.
        image_token_id, audio_token_id: placeholders, one a tower output; None without the tower or the token. Likewise
            image_bos_token_id and audio_bos_token_id, which precede them, and audio_end_token_id, which follows.
    """

    vocab_size: int = 201024
    kept_vocab_size: int = 200058
    hidden_size: int = 6144
    num_hidden_layers: int = 66
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 128
    swa_num_attention_heads: int = 64
    swa_num_key_value_heads: int = 16
    swa_head_dim: int = 128
    sliding_window: int = 512
    d_rel: int = 16
    rel_extent: int = 1024
    log_scaling_n_floor: int | None = 128000
    log_scaling_alpha: float = 0.1
    rms_norm_eps: float = 1e-6
    use_embed_norm: bool = True
    layer_types: tuple[str, ...] = ()
    sparse_layers: tuple[bool, ...] = ()
    conv_kernel_size: int = 4
    logits_mup_width_multiplier: float = 24.0
    num_experts: int = 256
    num_experts_per_tok: int = 6
    num_shared_experts: int = 2
    intermediate_size: int = 24576
    moe_intermediate_size: int = 3072
    route_scale: float = 8.0
    max_position_embeddings: int = 1048576
    eos_token_ids: tuple[int, ...] = (200006,)
    vision: VisionConfig | None = VisionConfig()
    audio: AudioConfig | None = AudioConfig()
    mtp: MTPConfig | None = MTPConfig()
    image_token_id: int | None = IMAGE_TOKEN
    audio_token_id: int | None = AUDIO_TOKEN
    image_bos_token_id: int | None = IMAGE_BOS_TOKEN
    audio_bos_token_id: int | None = AUDIO_BOS_TOKEN
    audio_end_token_id: int | None = AUDIO_END_TOKEN

    def __post_init__(self):
        # A config made in Python may leave the patterns out; derive them as published.
        n = self.num_hidden_layers
        if not self.layer_types:
            object.__setattr__(self, "layer_types", derived_layer_types(n))
        if not self.sparse_layers:
            object.__setattr__(self, "sparse_layers", tuple(i >= 2 for i in range(n)))
        problems = list(_problems(self))
        if problems:
            raise CheckpointError("config.json does not describe an Inkling model:\n  " + "\n  ".join(problems))

    def window(self, layer: int) -> int | None:
        """Keys visible to a query of this layer, itself included; None means all before it."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def num_heads(self, kind: str) -> int:
        """Query heads of a layer of this kind."""
        return self.swa_num_attention_heads if kind == SLIDING else self.num_attention_heads

    def num_kv_heads(self, kind: str) -> int:
        """Key and value heads of a layer of this kind."""
        return self.swa_num_key_value_heads if kind == SLIDING else self.num_key_value_heads

    def head_dim_of(self, kind: str) -> int:
        """Size of a head of a layer of this kind."""
        return self.swa_head_dim if kind == SLIDING else self.head_dim

    def extent(self, kind: str) -> int:
        """How far back the position bias of a layer of this kind reaches, the query's own place included."""
        return self.sliding_window if kind == SLIDING else self.rel_extent

    @property
    def cache_layers(self) -> tuple[LayerShape, ...]:
        """What each layer keeps of the tokens it has seen."""
        return tuple(map(self._layer_shape, self.layer_types))

    @property
    def draft_cache_layers(self) -> tuple[LayerShape, ...]:
        """What each drafting depth keeps."""
        return tuple(map(self._layer_shape, self.mtp.layer_types)) if self.mtp else ()

    def _layer_shape(self, kind: str) -> LayerShape:
        kv_heads, d = self.num_kv_heads(kind), self.head_dim_of(kind)
        channels = (kv_heads * d, kv_heads * d, self.hidden_size, self.hidden_size)
        return LayerShape(kind == SLIDING, kv_heads, d, channels)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> InklingConfig:
        """Reads the parsed `config.json` of a released or re-saved checkpoint.

        Raises:
            CheckpointError: a field is missing, ill-typed, unsupported, or two fields disagree; all faults at once.
        """
        return _read(raw)


def derived_layer_types(num_hidden_layers: int) -> tuple[str, ...]:
    """The published pattern: every sixth layer is full."""
    return tuple(SLIDING if (i + 1) % 6 else FULL for i in range(num_hidden_layers))


def _problems(c: InklingConfig):
    for name in (
        "vocab_size kept_vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "swa_num_attention_heads swa_num_key_value_heads swa_head_dim sliding_window d_rel rel_extent conv_kernel_size "
        "num_experts num_experts_per_tok num_shared_experts intermediate_size moe_intermediate_size"
    ).split():
        if getattr(c, name) < 1:
            yield f"{name} must be positive, not {getattr(c, name)}"
    for prefix in ("", "swa_"):
        heads, kv_heads = (getattr(c, f"{prefix}num_{name}_heads") for name in ("attention", "key_value"))
        if kv_heads > 0 and heads % kv_heads:
            yield f"{prefix}num_attention_heads {heads} is not a multiple of {prefix}num_key_value_heads {kv_heads}"
    if c.kept_vocab_size > c.vocab_size:
        yield f"unpadded_vocab_size {c.kept_vocab_size} exceeds vocab_size {c.vocab_size}"
    if c.num_experts_per_tok > c.num_experts:
        yield f"num_experts_per_tok {c.num_experts_per_tok} exceeds num_experts {c.num_experts}"
    for name in ("layer_types", "sparse_layers"):
        if len(getattr(c, name)) != c.num_hidden_layers:
            yield f"{name} has {len(getattr(c, name))} entries, num_hidden_layers is {c.num_hidden_layers}"
    kinds = set(c.layer_types) | set(c.mtp.layer_types if c.mtp else ())
    if unknown := sorted(kinds - {FULL, SLIDING}):
        yield f"layer_types may hold {FULL!r} and {SLIDING!r}, not {', '.join(map(repr, unknown))}"
    if c.max_position_embeddings < 2:
        yield f"max_position_embeddings {c.max_position_embeddings} leaves no room for a prompt and an answer"
    if c.log_scaling_n_floor is not None and not 1 <= c.log_scaling_n_floor < 1 << 31:
        yield f"log_scaling_n_floor must be null or in 1..{(1 << 31) - 1}, not {c.log_scaling_n_floor:.3e}"
    for name in ("rms_norm_eps", "logits_mup_width_multiplier", "route_scale"):
        if not getattr(c, name) > 0:
            yield f"{name} must be positive, not {getattr(c, name)}"
    if c.vision and min(dataclasses.astuple(c.vision)) < 1:
        yield f"vision_config must hold positive sizes, not {c.vision}"
    if c.audio and min(c.audio.num_mel_bins, c.audio.mel_vocab_size) < 1:
        yield f"audio_config must hold positive sizes, not {c.audio}"
    if c.audio and c.audio.mel_vocab_size > 256:
        yield f"mel_vocab_size {c.audio.mel_vocab_size} exceeds 256: bins are bytes"
    if c.audio and not c.audio.dmel_min_value < c.audio.dmel_max_value:
        yield f"dmel_min_value {c.audio.dmel_min_value} must be below dmel_max_value {c.audio.dmel_max_value}"
    for name in ("image_token_id", "audio_token_id"):
        value = getattr(c, name)
        if value is not None and not 0 <= value < c.vocab_size:
            yield f"{name} {value} is outside the vocabulary of {c.vocab_size}"
    if c.image_token_id is not None and c.image_token_id == c.audio_token_id:
        yield f"image_token_id and audio_token_id are both {c.image_token_id}; a placeholder stands for one of them"


# Keys that change nothing at inference, or that say again what other keys say, in any block. Transformers gives both
# towers sizes of a transformer that they do not have.
_IGNORED = frozenset(
    "architectures attention_dropout auto_map bos_token_id dtype eos_token_id initializer_range model_type "
    "number_of_conv_states pad_token_id quantization_config rms_norm_eps_moe_gate tie_word_embeddings torch_dtype "
    "transformers_version use_cache".split()
)
_IGNORED_VISION = _IGNORED | {"hidden_size", "num_attention_heads", "rms_norm_eps"}


def _read(raw: Mapping[str, Any]) -> InklingConfig:
    top = ConfigReader(raw, "Inkling", _IGNORED)
    text = top.block("text_config", _IGNORED)
    if text is None:
        raise CheckpointError("config.json has no usable text_config, the block that describes the language model")
    values = _read_text(text)
    vocab_size, hidden_size = values["vocab_size"], values["hidden_size"]
    vision, audio = _read_vision(top, hidden_size), _read_audio(top, hidden_size)
    values |= dict(
        eos_token_ids=top.token_ids("eos_token_id", vocab_size),  # the nested one is a class default
        vision=vision,
        audio=audio,
        mtp=_read_mtp(top, text, values),
        image_token_id=_placeholder(top, "image_token_id", IMAGE_TOKEN, vision, vocab_size),
        audio_token_id=_placeholder(top, "audio_token_id", AUDIO_TOKEN, audio, vocab_size),
        image_bos_token_id=_placeholder(top, "image_bos_token_id", IMAGE_BOS_TOKEN, vision, vocab_size),
        audio_bos_token_id=_placeholder(top, "audio_bos_token_id", AUDIO_BOS_TOKEN, audio, vocab_size),
        audio_end_token_id=_placeholder(top, "audio_end_token_id", AUDIO_END_TOKEN, audio, vocab_size),
    )
    top.finish()
    return InklingConfig(**values)


def _read_text(text: ConfigReader) -> dict[str, Any]:
    # The sizes have no sensible default: a file without one is not a config of this family.
    values: dict[str, Any] = {
        name: text.size(name)
        for name in "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim swa_num_attention_heads "
        "swa_num_key_value_heads swa_head_dim d_rel rel_extent num_experts_per_tok".split()
    }
    num_layers = text.size("num_hidden_layers", limit=MAX_LAYERS)
    dense_width, expert_width = _widths(text)
    text.must_be(
        q_bias=False,
        o_bias=False,
        use_sconv=True,
        shared_expert_sink=True,
        use_gate_bias=True,
        norm_after_topk=True,
        use_global_scale=True,
        gate_activation="sigmoid",
        hidden_act="silu",
        final_logit_softcapping=None,
        inference_moe_w13_interleaved=True,
        shared_experts_size=1,
        v_head_dim=values["head_dim"],
        mtp_hidden_states_first=True,
    )
    if text.raw.get("tie_word_embeddings"):
        text.fault("tie_word_embeddings", "= true is not supported: Inkling has a head of its own")
    return values | dict(
        num_hidden_layers=num_layers,
        kept_vocab_size=text.size("unpadded_vocab_size", values["vocab_size"]),
        sliding_window=text.size("sliding_window_size"),
        log_scaling_n_floor=text.field("log_scaling_n_floor", int),
        log_scaling_alpha=text.field("log_scaling_alpha", float, 0.1),
        rms_norm_eps=text.field("rms_norm_eps", float, 1e-6),
        use_embed_norm=text.field("use_embed_norm", bool, True),
        layer_types=_layer_types(text, num_layers),
        sparse_layers=_sparse_layers(text, num_layers),
        conv_kernel_size=text.size("conv_kernel_size", alias="sconv_kernel_size"),
        logits_mup_width_multiplier=text.field("logits_mup_width_multiplier", float, 1.0, required=True),
        num_experts=text.size("n_routed_experts"),
        num_shared_experts=text.size("n_shared_experts"),
        intermediate_size=dense_width,
        moe_intermediate_size=expert_width,
        route_scale=text.field("route_scale", float, 1.0, required=True),
        max_position_embeddings=text.size("max_position_embeddings", alias="model_max_length"),
    )


def _widths(text: ConfigReader) -> tuple[int, int]:
    """Widths of a dense MLP and of an expert: `intermediate_size` is either one, as the other's name tells."""
    either = text.size("intermediate_size")
    if text.raw.get("dense_intermediate_size") is None:
        return either, text.size("moe_intermediate_size")
    dense = text.size("dense_intermediate_size")
    if text.field("moe_intermediate_size", int, either) != either:
        text.fault("moe_intermediate_size", "and dense_intermediate_size contradict intermediate_size")
    return dense, either


def _layer_types(text: ConfigReader, n: int) -> tuple[str, ...]:
    names, local = text.strings("layer_types"), text.indices("local_layer_ids", n)
    if names is not None:
        kinds = tuple(_KINDS.get(name, name) for name in names)
        if local is not None and set(local) != {i for i, kind in enumerate(kinds) if kind == SLIDING}:
            text.fault("layer_types", "and local_layer_ids disagree about which layers slide")
        return kinds
    if local is None:
        return derived_layer_types(n)
    return tuple(SLIDING if i in local else FULL for i in range(n))


def _sparse_layers(text: ConfigReader, n: int) -> tuple[bool, ...]:
    names, dense = text.strings("mlp_layer_types"), text.field("dense_mlp_idx", int)
    if dense is not None and not 0 <= dense <= n:
        text.fault("dense_mlp_idx", f"= {dense} is not a number of layers from 0 to {n}")
    if names is None:
        if dense is None:
            text.fault("dense_mlp_idx", "is missing")
        return tuple(i >= (dense or 0) for i in range(n))
    if unknown := sorted(set(names) - {"dense", "sparse"}):
        text.fault("mlp_layer_types", f"may hold 'dense' and 'sparse', not {', '.join(map(repr, unknown))}")
    sparse = tuple(name == "sparse" for name in names)
    if dense is not None and sparse != tuple(i >= dense for i in range(len(sparse))):
        text.fault("mlp_layer_types", f"and dense_mlp_idx = {dense} disagree")
    return sparse


def _read_vision(top: ConfigReader, hidden_size: int) -> VisionConfig | None:
    block = top.block("vision_config", _IGNORED_VISION)
    if block is None:
        return None
    block.must_be(vision_encoder_type="hmlp", use_vision_norm=True)
    block.must_be(decoder_dmodel=hidden_size, text_hidden_size=hidden_size)
    return VisionConfig(
        patch_size=block.size("patch_size"),
        temporal_patch_size=block.size("temporal_patch_size"),
        num_channels=block.size("num_channels", 3, alias="n_channels"),
        num_layers=block.size("num_hidden_layers", 4, alias="n_layers", limit=MAX_LAYERS),
    )


def _read_audio(top: ConfigReader, hidden_size: int) -> AudioConfig | None:
    block = top.block("audio_config", _IGNORED | {"rms_norm_eps"})
    if block is None:
        return None
    block.must_be(audio_mode="dmel", use_audio_norm=True, bias=False)
    block.must_be(decoder_dmodel=hidden_size, text_hidden_size=hidden_size)
    return AudioConfig(
        num_mel_bins=block.size("n_mel_bins"),
        mel_vocab_size=block.size("mel_vocab_size"),
        dmel_min_value=block.field("dmel_min_value", float, AudioConfig.dmel_min_value),
        dmel_max_value=block.field("dmel_max_value", float, AudioConfig.dmel_max_value),
    )


def _read_mtp(top: ConfigReader, text: ConfigReader, trunk: dict[str, Any]) -> MTPConfig | None:
    """From an `mtp_config` of either place, or from the fields that transformers puts into `text_config`."""
    for reader in (top, text):
        block = reader.block("mtp_config", _IGNORED)
        if block is not None:
            break
    flat = _mtp_fields(text, "num_mtp_layers", "mtp_local_layer_ids")
    if block is None:
        return flat
    # Depths with attention of their own exist nowhere; a file that asks for them must not be run with the trunk's.
    own = {name: trunk[name] for name in trunk if name.endswith(("attention_heads", "key_value_heads", "head_dim"))}
    block.must_be(**own, local_extent=trunk["sliding_window"])
    nested = _mtp_fields(block, "num_nextn_predict_layers", "local_layer_ids", alias="n_layers")
    if flat is not None and flat != nested:
        block.fault("num_nextn_predict_layers", "and its companions disagree with text_config.num_mtp_layers and its")
    return nested


def _mtp_fields(reader: ConfigReader, count: str, local: str, alias: str = "") -> MTPConfig | None:
    n = reader.size(count, 0, alias, limit=MAX_LAYERS)
    post_norm = reader.field("chain_hidden_post_norm", bool, False)
    sliding = reader.indices(local, MAX_LAYERS) or []  # a file cut to fewer depths may keep the pattern of all
    return MTPConfig(tuple(SLIDING if i in sliding else FULL for i in range(n)), post_norm) if n > 0 else None


def _placeholder(top: ConfigReader, name: str, published: int, tower: object, vocab_size: int) -> int | None:
    value = top.field(name, int, published)
    # Transformers writes the published ids into every file, for vocabularies without them too.
    return None if tower is None or (value == published and value >= vocab_size) else value


INKLING_SMALL = InklingConfig(
    hidden_size=4096,
    num_hidden_layers=42,
    num_attention_heads=32,
    swa_num_attention_heads=32,
    swa_num_key_value_heads=8,
    logits_mup_width_multiplier=16.0,
    intermediate_size=16384,
    moe_intermediate_size=2048,
)
"""The published 276B model."""
