"""Flint's forward pass for training: the same function as `modeling.flint.Flint`, arranged for packed rows.

It differs from the model's own definition in speed only. Conversations packed into one row do not see each other;
sliding layers look at the block before and nothing else; all experts run as two matrix products, with the routing
weights applied before the down projection. `tests/checkpoints` checks that both agree in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.training.nvfp4 import round_trip
from modeling.flint.config import SLIDING, FlintConfig

Params = dict[str, Any]
QUANTISED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
KEPT_FLOAT32 = ("gate", "softmax_offset")  # the router and the sinks


def init(config: FlintConfig, seed: int) -> Params:
    """Random float32 parameters: a flat dict by the names on disk, the experts of a layer stacked."""
    rng = np.random.default_rng(seed)
    h, d = config.hidden_size, config.head_dim
    depth = (2 * config.num_hidden_layers) ** -0.5
    params: Params = {}

    def matrix(name: str, *shape: int, scale: float = 1.0) -> None:
        params[name] = rng.normal(0, scale * shape[-1] ** -0.5, shape).astype(np.float32)

    def swiglu(prefix: str, width: int, *lead: int) -> None:
        matrix(f"{prefix}.gate_proj.weight", *lead, width, h)
        matrix(f"{prefix}.up_proj.weight", *lead, width, h)
        matrix(f"{prefix}.down_proj.weight", *lead, h, width, scale=depth)

    params["model.embed_tokens.weight"] = rng.normal(0, 0.5, (config.vocab_size, h)).astype(np.float32)
    matrix("lm_head.weight", config.vocab_size, h, scale=0.3)
    params["model.norm.weight"] = np.ones(h, np.float32)
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            params[f"{at}.{name}.weight"] = np.ones(h, np.float32)
        for name in ("q_norm", "k_norm"):
            params[f"{at}.self_attn.{name}.weight"] = np.ones(d, np.float32)
        params[f"{at}.self_attn.softmax_offset"] = np.zeros(config.num_attention_heads, np.float32)
        matrix(f"{at}.self_attn.q_proj.weight", config.num_attention_heads * d, h)
        matrix(f"{at}.self_attn.k_proj.weight", config.num_key_value_heads * d, h)
        matrix(f"{at}.self_attn.v_proj.weight", config.num_key_value_heads * d, h)
        matrix(f"{at}.self_attn.o_proj.weight", h, config.num_attention_heads * d, scale=depth)
        if config.sparse_layers[i]:
            matrix(f"{at}.mlp.gate.weight", config.num_experts, h)
            swiglu(f"{at}.mlp.experts", config.moe_intermediate_size, config.num_experts)
            swiglu(f"{at}.mlp.shared_expert", config.shared_expert_intermediate_size)
        else:
            swiglu(f"{at}.mlp", config.intermediate_size)
    return jax.tree.map(jnp.asarray, params)


def is_quantised(name: str) -> bool:
    """Whether the NVFP4 checkpoint packs this parameter: every linear layer, the LM head included."""
    return name.removesuffix(".weight").rsplit(".", 1)[-1] in QUANTISED


def is_float32(name: str) -> bool:
    """Whether the BF16 checkpoint keeps this parameter in float32: routers and sinks."""
    return name.removesuffix(".weight").rsplit(".", 1)[-1] in KEPT_FLOAT32


def cast(params: Params, dtype: Any, quantise: bool = False) -> Params:
    """Parameters as the forward pass reads them: bf16 (or float32), optionally through an NVFP4 round trip."""

    def one(name: str, value: jax.Array) -> jax.Array:
        if quantise and is_quantised(name):
            # Products of codes and scales are exact in bf16; here the global scale is folded in as well.
            value = round_trip(value.astype(jnp.bfloat16).astype(jnp.float32))
        return value if is_float32(name) else value.astype(dtype)

    return {name: one(name, value) for name, value in params.items()}


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, dtype: Any) -> jax.Array:
    x = x.astype(jnp.float32)
    return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight.astype(jnp.float32)).astype(dtype)


def rope(x: jax.Array, theta: float) -> jax.Array:
    """Positions count from the row's start: only differences matter, and those never cross a conversation."""
    half = x.shape[-1] // 2
    inv_freq = (1.0 / theta ** (np.arange(half) / half)).astype(np.float32)
    angles = (np.arange(x.shape[1], dtype=np.float32)[:, None] * inv_freq)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = np.cos(angles), np.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array, mask: jax.Array) -> jax.Array:
    """q [..., T, heads, d], k and v [..., S, kv_heads, d], mask [..., T, S] -> [..., T, heads, d].

    In bf16 the scores are rounded to bf16, which the model does not do: half the memory traffic, for a little noise.
    """
    groups = q.shape[-2] // k.shape[-2]
    q = q.reshape(*q.shape[:-2], k.shape[-2], groups, q.shape[-1])
    scores = jnp.einsum("...tkgd,...skd->...kgts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(mask[..., None, None, :, :], scores, -1e30)
    sink = sinks.reshape(k.shape[-2], groups, 1, 1)
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sink))
    p = jnp.exp(scores - top)
    total = p.sum(-1, keepdims=True) + jnp.exp(sink - top)
    out = jnp.einsum("...kgts,...skd->...tkgd", (p / total).astype(v.dtype), v)
    return out.reshape(*out.shape[:-3], -1, out.shape[-1])


class WindowBlocks:
    """Packed rows cut for sliding-window attention: a block of queries sees its own and the previous block of keys.

    Attributes:
        size: tokens of a block, at least the window where a row divides into such blocks.
        mask: [batch, blocks, size, 2 * size], the keys that are near and of the same conversation.
    """

    def __init__(self, segments: jax.Array, window: int):
        length = segments.shape[1]
        size = max(64, -(-window // 64) * 64)
        self.size = size = size if length % size == 0 else length
        distance = (np.arange(size)[:, None] + size) - np.arange(2 * size)[None, :]
        near = jnp.asarray((distance >= 0) & (distance < window))
        # The keys before the first block are padding: their segment must equal nobody's.
        same = self.split(segments)[..., :, None] + 1 == self.with_previous(segments + 1)[..., None, :]
        self.mask = near & same

    def split(self, x: jax.Array) -> jax.Array:
        """x [batch, length, ...] -> [batch, blocks, size, ...]."""
        return x.reshape(x.shape[0], -1, self.size, *x.shape[2:])

    def with_previous(self, x: jax.Array) -> jax.Array:
        """x [batch, length, ...] -> [batch, blocks, 2 * size, ...], zeros before the first block."""
        x = self.split(x)
        before = jnp.pad(x, [(0, 0), (1, 0)] + [(0, 0)] * (x.ndim - 2))[:, :-1]
        return jnp.concatenate([before, x], 2)


def sliding(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array, segments: jax.Array, window: int) -> jax.Array:
    """Sliding-window attention block by block: a block of queries sees its own and the previous block of keys."""
    blocks = WindowBlocks(segments, window)
    out = attend(blocks.split(q), blocks.with_previous(k), blocks.with_previous(v), sinks, blocks.mask)
    return out.reshape(*segments.shape, *out.shape[3:])


def is_among_largest(logits: jax.Array, count: int) -> jax.Array:
    """Whether each of the last axis' values is among its `count` largest; the lowest index wins a tie.

    Comparing all pairs is faster than sorting for a handful of experts.
    """
    mine, other = logits[..., :, None], logits[..., None, :]
    index = np.arange(logits.shape[-1])
    ahead = (other > mine) | ((other == mine) & (index[None, :] < index[:, None]))
    return ahead.sum(-1) < count


def moe(y: jax.Array, layer: Params, config: FlintConfig) -> tuple[jax.Array, jax.Array]:
    """Routed and shared experts on y [tokens, hidden], and the load-balancing loss."""
    router = layer["mlp.gate.weight"].astype(jnp.float32)
    logits = jnp.dot(y.astype(jnp.float32), router.T, precision=jax.lax.Precision.HIGHEST)
    scores = jax.nn.sigmoid(logits)
    chosen = is_among_largest(jax.lax.stop_gradient(logits), config.num_experts_per_tok).astype(jnp.float32)
    weights = scores * chosen  # [tokens, experts]
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    gate, up, down = (layer[f"mlp.experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
    width = gate.shape[1]
    gate, up = (jnp.dot(y, w.reshape(-1, y.shape[-1]).T) for w in (gate, up))  # [tokens, experts * width]
    act = jax.nn.silu(gate.astype(jnp.float32)) * up * jnp.repeat(weights, width, axis=1)
    out = jnp.dot(act.astype(y.dtype), down.swapaxes(1, 2).reshape(-1, y.shape[-1]))
    share = (scores / scores.sum(-1, keepdims=True)).mean(0)
    balance = config.num_experts / config.num_experts_per_tok * (chosen.mean(0) * share).sum()
    return out + swiglu(y, layer, "mlp.shared_expert"), balance


def swiglu(y: jax.Array, layer: Params, at: str) -> jax.Array:
    gate, up = (jnp.dot(y, layer[f"{at}.{name}_proj.weight"].T).astype(jnp.float32) for name in ("gate", "up"))
    return jnp.dot((jax.nn.silu(gate) * up).astype(y.dtype), layer[f"{at}.down_proj.weight"].T)


def forward(params: Params, tokens: jax.Array, segments: jax.Array, config: FlintConfig) -> tuple[jax.Array, jax.Array]:
    """tokens, segments [batch, length] -> float32 logits [batch, length, vocab], and the mean load-balancing loss."""
    dtype, eps = params["model.embed_tokens.weight"].dtype, config.rms_norm_eps
    # A product with one-hot rows, because the gradient of a gather adds to a few rows thousands of times, in turn.
    x = jnp.dot(jax.nn.one_hot(tokens, config.vocab_size, dtype=dtype), params["model.embed_tokens.weight"])
    batch, length, hidden = x.shape
    causal = np.tri(length, dtype=bool) & (segments[:, :, None] == segments[:, None, :])
    balances = []
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        layer = {name.removeprefix(at): value for name, value in params.items() if name.startswith(at)}

        def block(x: jax.Array, layer: Params, i: int = i) -> tuple[jax.Array, jax.Array]:
            y = rms_norm(x, layer["input_layernorm.weight"], eps, dtype)
            q, k, v = (
                jnp.dot(y, layer[f"self_attn.{n}_proj.weight"].T).reshape(batch, length, -1, config.head_dim)
                for n in "qkv"
            )
            q = rms_norm(q, layer["self_attn.q_norm.weight"], eps, dtype)
            k = rms_norm(k, layer["self_attn.k_norm.weight"], eps, dtype)
            sinks, window = layer["self_attn.softmax_offset"], config.window(i)
            if config.layer_types[i] == SLIDING:
                q, k = rope(q, config.rope_theta), rope(k, config.rope_theta)
            if window is not None:
                out = sliding(q, k, v, sinks, segments, window)
            else:
                out = attend(q, k, v, sinks, jnp.asarray(causal))
            x = x + jnp.dot(out.reshape(batch, length, -1), layer["self_attn.o_proj.weight"].T)
            y = rms_norm(x, layer["post_attention_layernorm.weight"], eps, dtype)
            if not config.sparse_layers[i]:
                return x + swiglu(y, layer, "mlp"), jnp.zeros(())
            out, balance = moe(y.reshape(-1, hidden), layer, config)
            return x + out.reshape(x.shape), balance

        x, balance = block(x, layer)
        balances.append(balance)
    y = rms_norm(x, params["model.norm.weight"], eps, dtype)
    logits = jnp.dot(y, params["lm_head.weight"].T, preferred_element_type=jnp.float32)
    return logits, jnp.stack(balances).sum() / max(1, sum(config.sparse_layers))
