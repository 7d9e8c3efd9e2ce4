"""Inkling's forward pass for training: the same function as `modeling.inkling.Inkling`, arranged for packed rows.

It differs from the model's own definition in speed only. Conversations packed into one row do not see each other,
neither in attention nor through short convolutions; sliding layers look at the block before and nothing else; all
experts, routed and shared, run as two matrix products with the routing weights applied before the down projection.
`tests/checkpoints` checks that both agree in float32.

Parameters are a flat dict by the names on disk, in the shapes on disk, w13 interleaved.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.training.forward import WindowBlocks, is_among_largest, rms_norm
from checkpoints.training.nvfp4 import round_trip
from modeling.inkling.config import SLIDING, InklingConfig
from modeling.inkling.towers import fold

Params = dict[str, Any]
FIRST_PACKED_LAYER = 3  # routed experts of the layers before it stay bfloat16, as released
BLOCK = 256  # queries of a full layer that run together; keys behind them are not looked at


class Rows(NamedTuple):
    """Packed conversations and their media, on the device.

    Attributes:
        tokens, segments: [rows, length]; segment 0 is padding.
        patches: [patches, height, width, channels]; patch_at: [patches] places in the flattened rows; past the end for
            none. frames: [frames, mel_bins] bins; frame_at likewise.
    """

    tokens: jax.Array
    segments: jax.Array
    patches: jax.Array
    patch_at: jax.Array
    frames: jax.Array
    frame_at: jax.Array


class Outputs(NamedTuple):
    """What a forward pass gives.

    Attributes:
        hidden: final hidden states of the trunk, then of each depth, [rows, length, hidden_size]; depth n at place p
            predicts the token at p + n + 2.
        loads: [sparse layers, experts], the share of tokens that each expert takes.
        largest: by the name of a stack of experts, the largest magnitude that enters it.
    """

    hidden: list[jax.Array]
    loads: jax.Array
    largest: dict[str, jax.Array]


class _Where(NamedTuple):
    """What layers know of the rows: segments, positions in them, and which of the three tokens before are of theirs."""

    segments: jax.Array
    positions: jax.Array
    before: list[jax.Array]


def init(config: InklingConfig, vision: tuple[tuple[int, int], ...], seed: int) -> Params:
    """Random float32 parameters."""
    rng = np.random.default_rng(seed)
    h = config.hidden_size
    depth = (2 * config.num_hidden_layers) ** -0.5
    params: Params = {}

    def matrix(name: str, *shape: int, scale: float = 1.0) -> None:
        params[name] = rng.normal(0, scale * shape[-1] ** -0.5, shape).astype(np.float32)

    def constant(name: str, size: int, value: float = 1.0) -> None:
        params[name] = np.full(size, value, np.float32)

    def layer(at: str, kind: str, sparse: bool) -> None:
        heads, kv_heads, d = config.num_heads(kind), config.num_kv_heads(kind), config.head_dim_of(kind)
        for name in ("attn_norm", "mlp_norm"):
            constant(f"{at}.{name}.weight", h)
        for name in ("q_norm", "k_norm"):  # the scale is 1 / d: these make it what 1 / sqrt(d) is to plain norms
            constant(f"{at}.attn.{name}.weight", d, d**0.25)
        for name, size in (("wq_du", heads * d), ("wk_dv", kv_heads * d), ("wv_dv", kv_heads * d)):
            matrix(f"{at}.attn.{name}.weight", size, h)
        matrix(f"{at}.attn.wr_du.weight", heads * config.d_rel, h)
        matrix(f"{at}.attn.wo_ud.weight", h, heads * d, scale=depth)
        params[f"{at}.attn.rel_logits_proj.proj"] = rng.normal(
            0, config.d_rel**-0.5, (config.d_rel, config.extent(kind))
        ).astype(np.float32)
        for name, size in (("attn.k_sconv", kv_heads * d), ("attn.v_sconv", kv_heads * d), ("attn_sconv", h),
                           ("mlp_sconv", h)):  # fmt: skip
            params[f"{at}.{name}.weight"] = rng.normal(0, 0.1, (size, 1, config.conv_kernel_size)).astype(np.float32)
        if not sparse:
            constant(f"{at}.mlp.global_scale", 1)
            matrix(f"{at}.mlp.w13_dn.weight", 2 * config.intermediate_size, h)
            matrix(f"{at}.mlp.w2_md.weight", h, config.intermediate_size, scale=depth)
            return
        experts, shared, width = config.num_experts, config.num_shared_experts, config.moe_intermediate_size
        matrix(f"{at}.mlp.gate.weight", experts + shared, h)
        constant(f"{at}.mlp.gate.bias", experts, 0.0)
        constant(f"{at}.mlp.gate.global_scale", 1)
        matrix(f"{at}.mlp.experts.w13_weight", experts, 2 * width, h)
        matrix(f"{at}.mlp.experts.w2_weight", experts, h, width, scale=depth)
        matrix(f"{at}.mlp.shared_experts.shared_w13_weight", shared, 2 * width, h)
        matrix(f"{at}.mlp.shared_experts.shared_w2_weight", shared, h, width, scale=depth)

    params["model.llm.embed.weight"] = rng.normal(0, 0.5, (config.vocab_size, h)).astype(np.float32)
    matrix("model.llm.unembed.weight", config.vocab_size, h, scale=config.logits_mup_width_multiplier * 0.3)
    for name in ("embed_norm", "norm"):
        constant(f"model.llm.{name}.weight", h)
    for i, (kind, sparse) in enumerate(zip(config.layer_types, config.sparse_layers, strict=True)):
        layer(f"model.llm.layers.{i}", kind, sparse)
    for n, kind in enumerate(config.mtp.layer_types if config.mtp else ()):
        for name in ("hidden_norm", "embed_norm"):
            constant(f"model.mtp.layers.{n}.{name}.weight", h)
        matrix(f"model.mtp.layers.{n}.input_proj.weight", h, 2 * h)
        layer(f"model.mtp.layers.{n}.transformer_block", kind, sparse=False)
    if config.vision:
        for i, (out, width) in enumerate(vision):
            matrix(f"model.visual.layers.linear_{i}.weight", out, width)
            constant(f"model.visual.{'final_norm' if i + 1 == len(vision) else f'layers.norm_{i}'}.weight", out)
    if config.audio:
        rows = config.audio.num_mel_bins * config.audio.mel_vocab_size
        params["model.audio.encoder.weight"] = rng.normal(0, 0.1, (rows, h)).astype(np.float32)
        constant("model.audio.final_norm.weight", h)
    return jax.tree.map(jnp.asarray, params)


def is_packed(name: str) -> bool:
    """Whether the NVFP4 checkpoint packs this parameter: routed experts from layer 3 on."""
    return ".mlp.experts." in name and int(name.split(".")[3]) >= FIRST_PACKED_LAYER


def is_float32(name: str) -> bool:
    """Whether checkpoints keep this parameter in float32: the router's bias and scale."""
    return name.endswith((".gate.bias", ".gate.global_scale"))


def cast(params: Params, dtype: Any, quantise: bool = False) -> Params:
    """Parameters as the forward pass reads them: bf16 (or float32), optionally through an NVFP4 round trip."""

    def one(name: str, value: jax.Array) -> jax.Array:
        if quantise and is_packed(name):
            value = round_trip(value.astype(jnp.bfloat16).astype(jnp.float32))
        return value if is_float32(name) else value.astype(dtype)

    return {name: one(name, value) for name, value in params.items()}


def forward(params: Params, rows: Rows, config: InklingConfig) -> Outputs:
    """The trunk and every depth over packed rows."""
    dtype, eps = params["model.llm.embed.weight"].dtype, config.rms_norm_eps
    segments = rows.segments.astype(jnp.int32)
    where = _Where(segments, _positions(segments), [_same(segments, back) for back in (1, 2, 3)])
    embeds = embed(params, rows, config)
    loads, largest = [], {}
    h = embeds
    for i, (kind, sparse) in enumerate(zip(config.layer_types, config.sparse_layers, strict=True)):
        h, load, tops = _layer(_part(params, f"model.llm.layers.{i}."), h, where, kind, config)
        if sparse:
            loads.append(load)
            largest |= {f"model.llm.layers.{i}.mlp.experts.{name}": top for name, top in tops.items()}
    hidden = [rms_norm(h, params["model.llm.norm.weight"], eps, dtype)]
    for n, kind in enumerate(config.mtp.layer_types if config.mtp else ()):
        depth = _part(params, f"model.mtp.layers.{n}.")
        ahead = jnp.pad(embeds[:, n + 1 :], ((0, 0), (0, n + 1), (0, 0)))
        both = [
            rms_norm(x, depth[f"{name}.weight"], eps, dtype)
            for name, x in (("hidden_norm", hidden[-1]), ("embed_norm", ahead))
        ]
        z = jnp.dot(jnp.concatenate(both, -1), depth["input_proj.weight"].T)
        hidden.append(_layer(_part(depth, "transformer_block."), z, where, kind, config)[0])
    return Outputs(hidden, jnp.stack(loads), largest)


def logits_of(params: Params, hidden: jax.Array, config: InklingConfig) -> jax.Array:
    """Hidden states [..., hidden_size] to float32 logits [..., kept_vocab_size]."""
    head = params["model.llm.unembed.weight"][: config.kept_vocab_size]
    return jnp.dot(hidden, head.T, preferred_element_type=jnp.float32) / config.logits_mup_width_multiplier


def embed(params: Params, rows: Rows, config: InklingConfig) -> jax.Array:
    """Token embeddings, normed; tower outputs in the places of their placeholders."""
    table = params["model.llm.embed.weight"]
    # A product with one-hot rows, because the gradient of a gather adds to a few rows thousands of times, in turn.
    x = jnp.dot(jax.nn.one_hot(rows.tokens.astype(jnp.int32), config.vocab_size, dtype=table.dtype), table)
    x = rms_norm(x, params["model.llm.embed_norm.weight"], config.rms_norm_eps, table.dtype)
    flat = x.reshape(-1, x.shape[-1])
    if config.vision:
        flat = flat.at[rows.patch_at].set(look(params, rows.patches, config), mode="drop")
    if config.audio:
        flat = flat.at[rows.frame_at].set(listen(params, rows.frames, config), mode="drop")
    return flat.reshape(x.shape)


def look(params: Params, patches: jax.Array, config: InklingConfig) -> jax.Array:
    """The vision tower on still patches [rows, height, width, channels], which are the same at every time."""
    assert config.vision is not None
    eps, dtype = config.rms_norm_eps, params["model.llm.embed.weight"].dtype
    x, last = patches.astype(dtype)[:, None], config.vision.num_layers - 1
    for i in range(last):
        weight = params[f"model.visual.layers.linear_{i}.weight"]
        x = jnp.dot(fold(x, 1, round((weight.shape[1] / x.shape[-1]) ** 0.5)), weight.T)
        x = rms_norm(x, params[f"model.visual.layers.norm_{i}.weight"], eps, dtype)
        x = jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(dtype)
    x = jnp.tile(x.reshape(len(x), -1), config.vision.temporal_patch_size)
    x = jnp.dot(x, params[f"model.visual.layers.linear_{last}.weight"].T)
    return rms_norm(x, params["model.visual.final_norm.weight"], eps, dtype)


def listen(params: Params, frames: jax.Array, config: InklingConfig) -> jax.Array:
    """The audio tower on frames [rows, mel_bins]."""
    assert config.audio is not None
    table = params["model.audio.encoder.weight"]
    bins = jax.nn.one_hot(frames.astype(jnp.int32), config.audio.mel_vocab_size, dtype=table.dtype)
    x = jnp.dot(bins.reshape(len(bins), -1), table, preferred_element_type=jnp.float32)
    return rms_norm(x, params["model.audio.final_norm.weight"], config.rms_norm_eps, table.dtype)


def _part(params: Params, at: str) -> Params:
    return {name.removeprefix(at): value for name, value in params.items() if name.startswith(at)}


def _positions(segments: jax.Array) -> jax.Array:
    """Each token's place in its conversation."""
    index = jnp.arange(segments.shape[1])
    starts = jnp.where(_same(segments, 1), 0, index)
    return index - jax.lax.cummax(starts, axis=1)


def _same(segments: jax.Array, back: int) -> jax.Array:
    """Whether the token `back` before is of the same conversation."""
    return segments == jnp.pad(segments, ((0, 0), (back, 0)), constant_values=-1)[:, :-back]


def _sconv(x: jax.Array, weight: jax.Array, where: _Where) -> jax.Array:
    """The short convolution and its residual; x [rows, length, channels], weight [channels, 1, taps]."""
    taps = weight[:, 0].astype(jnp.float32).T
    x32 = x.astype(jnp.float32)
    total = x32 * (1 + taps[-1])
    for back, same in enumerate(where.before, 1):
        moved = jnp.pad(x32, ((0, 0), (back, 0), (0, 0)))[:, :-back]
        total = total + jnp.where(same[..., None], moved, 0) * taps[-1 - back]
    return total.astype(x.dtype)


def _layer(
    layer: Params, h: jax.Array, where: _Where, kind: str, config: InklingConfig
) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array]]:
    eps, dtype = config.rms_norm_eps, h.dtype
    u = _attention(layer, rms_norm(h, layer["attn_norm.weight"], eps, dtype), where, kind, config)
    h = h + _sconv(u, layer["attn_sconv.weight"], where)
    m = rms_norm(h, layer["mlp_norm.weight"], eps, dtype)
    if "mlp.gate.weight" in layer:
        y, load, largest = _moe(m, layer, where, config)
    else:
        y, load, largest = _dense(m, layer), None, {}
    return h + _sconv(y, layer["mlp_sconv.weight"], where), load, largest


def _dense(m: jax.Array, layer: Params) -> jax.Array:
    w13 = layer["mlp.w13_dn.weight"]
    gate, up = (jnp.dot(m, w13[i::2].T).astype(jnp.float32) for i in (0, 1))
    y = jnp.dot((jax.nn.silu(gate) * up).astype(m.dtype), layer["mlp.w2_md.weight"].T)
    return y * layer["mlp.global_scale"].astype(m.dtype)


def _moe(
    m: jax.Array, layer: Params, where: _Where, config: InklingConfig
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Routed and shared experts alike, the load of each routed one, and the largest values that enter them."""
    experts = config.num_experts
    gate = layer["mlp.gate.weight"].astype(jnp.float32)
    scores = jax.nn.sigmoid(jnp.dot(m.astype(jnp.float32), gate.T, precision=jax.lax.Precision.HIGHEST))
    selection = jax.lax.stop_gradient(scores[..., :experts] + layer["mlp.gate.bias"])
    chosen = is_among_largest(selection, config.num_experts_per_tok)
    active = jnp.pad(chosen, ((0, 0), (0, 0), (0, config.num_shared_experts)), constant_values=True)
    weights = scores * active
    weights = weights / weights.sum(-1, keepdims=True) * (config.route_scale * layer["mlp.gate.global_scale"])
    w13 = jnp.concatenate([layer["mlp.experts.w13_weight"], layer["mlp.shared_experts.shared_w13_weight"]])
    w2 = jnp.concatenate([layer["mlp.experts.w2_weight"], layer["mlp.shared_experts.shared_w2_weight"]])
    width, hidden = w2.shape[2], m.shape[-1]
    gate, up = (jnp.dot(m, w13[:, i::2].reshape(-1, hidden).T) for i in (0, 1))  # [rows, length, experts * width]
    act = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    y = jnp.dot((act * jnp.repeat(weights, width, axis=-1)).astype(m.dtype), w2.swapaxes(1, 2).reshape(-1, hidden))
    real = (where.segments > 0)[..., None]
    load = (chosen & real).sum((0, 1)) / jnp.maximum(real.sum(), 1)
    used = jnp.repeat(chosen & real, width, axis=-1)
    largest = {
        "w13_weight": jnp.where(real, jnp.abs(m), 0).max(),
        "w2_weight": jnp.where(used, jnp.abs(act[..., : experts * width]), 0).max(),
    }
    return y, load, largest


def _attention(layer: Params, x: jax.Array, where: _Where, kind: str, config: InklingConfig) -> jax.Array:
    d, eps, dtype = config.head_dim_of(kind), config.rms_norm_eps, x.dtype
    lead = x.shape[:2]
    q, k, v, r = (jnp.dot(x, layer[f"attn.{name}.weight"].T) for name in ("wq_du", "wk_dv", "wv_dv", "wr_du"))
    k, v = (_sconv(y, layer[f"attn.{name}.weight"], where) for y, name in ((k, "k_sconv"), (v, "v_sconv")))
    q, k, v = (y.reshape(*lead, -1, d) for y in (q, k, v))
    q = rms_norm(q, layer["attn.q_norm.weight"], eps, dtype)
    k = rms_norm(k, layer["attn.k_norm.weight"], eps, dtype)
    rel = jnp.einsum("bthr,re->bhte", r.reshape(*lead, -1, config.d_rel), layer["attn.rel_logits_proj.proj"])
    if kind == SLIDING:
        out = _sliding(q, k, v, rel, where.segments, config.sliding_window)
    else:
        if config.log_scaling_n_floor is not None:
            far = jnp.maximum((where.positions + 1) / config.log_scaling_n_floor, 1.0)
            tau = 1 + config.log_scaling_alpha * jnp.log(far.astype(jnp.float32))
            q = (q * tau[..., None, None]).astype(dtype)
            rel = (rel * tau[:, None, :, None]).astype(dtype)
        out = _full(q, k, v, rel, where.segments)
    return jnp.dot(out.reshape(*lead, -1), layer["attn.wo_ud.weight"].T)


def shear(rel: jax.Array, offset: int, keys: int) -> jax.Array:
    """A bias by distance as a bias by key, without a gather, whose gradient would be slow.

    Args:
        rel: [..., queries, extent], by the distance back from the query.
        offset: queries come this many keys after the first key.

    Returns:
        [..., queries, keys], zero where the distance is negative or not below the extent.
    """
    queries, extent = rel.shape[-2:]
    lead = [(0, 0)] * (rel.ndim - 2)
    before = max(0, extent - 1 - offset)  # keys there are not, so that every row has room for its whole extent
    width = keys + before
    at = offset + before - (extent - 1)  # of the farthest key of the first query
    # Rows one longer than they are read: each is read one place further right than the one above.
    padded = jnp.pad(rel[..., ::-1], [*lead, (0, 0), (at, width + 1 - at - extent)])
    flat = padded.reshape(*rel.shape[:-2], -1)[..., : queries * width]
    return flat.reshape(*rel.shape[:-2], queries, width)[..., before:]


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, mask: jax.Array) -> jax.Array:
    """q [..., T, heads, d], k and v [..., S, kv_heads, d], bias [..., heads, T, S], mask [..., T, S]."""
    kv_heads, d = k.shape[-2:]
    groups = q.shape[-2] // kv_heads
    q = q.reshape(*q.shape[:-2], kv_heads, groups, d)
    scores = jnp.einsum("...tkgd,...skd->...kgts", q, k).astype(jnp.float32) / d
    scores = scores + bias.reshape(scores.shape)
    p = jax.nn.softmax(jnp.where(mask[..., None, None, :, :], scores, -1e30), -1)
    out = jnp.einsum("...kgts,...skd->...tkgd", p.astype(v.dtype), v)
    return out.reshape(*out.shape[:-3], -1, d)


def _full(q: jax.Array, k: jax.Array, v: jax.Array, rel: jax.Array, segments: jax.Array) -> jax.Array:
    """Causal attention, a block of queries at a time to the keys up to its end."""
    length, outs = q.shape[1], []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        causal = np.arange(start, end)[:, None] >= np.arange(end)[None, :]
        mask = jnp.asarray(causal) & (segments[:, start:end, None] == segments[:, None, :end])
        bias = shear(rel[:, :, start:end], start, end)
        outs.append(_attend(q[:, start:end], k[:, :end], v[:, :end], bias, mask))
    return jnp.concatenate(outs, 1)


def _sliding(q: jax.Array, k: jax.Array, v: jax.Array, rel: jax.Array, segments: jax.Array, window: int) -> jax.Array:
    """Sliding-window attention: a block of queries sees its own and the previous block of keys."""
    blocks = WindowBlocks(segments, window)
    size = blocks.size
    rel = rel.reshape(*rel.shape[:2], -1, size, rel.shape[-1]).swapaxes(1, 2)
    bias = shear(rel, size, 2 * size)
    out = _attend(blocks.split(q), blocks.with_previous(k), blocks.with_previous(v), bias, blocks.mask)
    return out.reshape(*segments.shape, *out.shape[3:])
