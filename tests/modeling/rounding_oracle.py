"""Flint in plain numpy, float64 sums, with every rounding point of the reference as a switch.

Written from the published rules alone, sharing nothing with `modeling`. A switch named in `wrong` replaces one rule by
the mistake an implementation could make there, so that a test can show that it would notice.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

MISTAKES = (
    "norm reads the rounded residual sum",
    "norm rounds before the weight",
    "qk norm not rounded before RoPE",
    "RoPE rounds each product",
    "probabilities not rounded for PV",
    "routed gate and up rounded",
    "shared gate and up not rounded",
    "routing weights not rounded",
    "router logits not rounded",
    "routed sum not rounded before the shared add",
    "attention output not rounded",
)


def bf(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def silu(x):
    return x / (1 + np.exp(-x))


class Oracle:
    """`params` maps parameter names to float64 arrays; `wrong` names one of MISTAKES or is empty."""

    def __init__(self, config, params, wrong: str = ""):
        self.c, self.p, self.wrong = config, params, wrong

    def bf_unless(self, mistake, x):
        return x if self.wrong == mistake else bf(x)

    def bf_if(self, mistake, x):
        return bf(x) if self.wrong == mistake else x

    def norm(self, x, weight):
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c.rms_norm_eps)
        return bf(self.bf_if("norm rounds before the weight", y) * weight)

    def add_norm(self, x, residual, weight):
        total = x + residual
        return self.norm(self.bf_if("norm reads the rounded residual sum", total), weight), bf(total)

    def linear(self, x, name):
        return bf(x @ self.p[name + ".weight"].T)

    def rope(self, x, tokens):
        d = self.c.head_dim
        inv = np.float32(1) / (self.c.rope_theta ** (np.arange(0, d, 2) / np.float32(d))).astype(np.float32)
        angle = (np.arange(tokens, dtype=np.float32)[:, None] * inv).astype(np.float64)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., : d // 2], x[..., d // 2 :]
        r = lambda y: self.bf_if("RoPE rounds each product", y)  # noqa: E731
        return bf(np.concatenate([r(a * cos) - r(b * sin), r(b * cos) + r(a * sin)], -1))

    def attention(self, x, layer):
        c, name, tokens = self.c, f"layers.{layer}.self_attn.", len(x)
        q, k, v = (self.linear(x, name + f"{n}_proj").reshape(tokens, -1, c.head_dim) for n in "qkv")
        q, k = self.norm_heads(q, name + "q_norm"), self.norm_heads(k, name + "k_norm")
        if c.layer_types[layer] == "sliding_attention":
            q, k = self.rope(q, tokens), self.rope(k, tokens)
        q, k = bf(q), bf(k)
        window = c.window(layer) or tokens
        out = np.zeros_like(q)
        for i in range(tokens):
            seen = slice(max(0, i - window + 1), i + 1)
            for h in range(c.num_attention_heads):
                g = h // (c.num_attention_heads // c.num_key_value_heads)
                s = k[seen, g] @ q[i, h]
                p = np.exp((s - s.max()) * c.head_dim**-0.5)
                z = p.sum() + np.exp(self.p[name + "sinks"][h] - s.max() * c.head_dim**-0.5)
                out[i, h] = (self.bf_unless("probabilities not rounded for PV", p) @ v[seen, g]) / z
        out = self.bf_unless("attention output not rounded", out)
        return self.linear(out.reshape(tokens, -1), name + "o_proj")

    def norm_heads(self, x, name):
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c.rms_norm_eps) * self.p[name + ".weight"]
        return self.bf_unless("qk norm not rounded before RoPE", y)

    def swiglu(self, x, name):
        gate, up = (x @ self.p[name + f"{n}_proj.weight"].T for n in ("gate", "up"))
        gate = self.bf_unless("shared gate and up not rounded", gate)
        up = self.bf_unless("shared gate and up not rounded", up)
        return self.linear(bf(silu(gate) * up), name + "down_proj")

    def moe(self, x, name):
        c, p = self.c, self.p
        logits = self.bf_unless("router logits not rounded", x @ p[name + "gate"].T)
        out = np.zeros_like(x)
        for t in range(len(x)):
            chosen = np.argsort(-logits[t], kind="stable")[: c.num_experts_per_tok]
            scores = 1 / (1 + np.exp(-logits[t, chosen]))
            weights = self.bf_unless("routing weights not rounded", scores / (scores.sum() + 1e-20))
            for e, w in zip(chosen, weights, strict=True):
                gate, up = (x[t] @ p[name + f"experts.{n}_proj.weight"][e].T for n in ("gate", "up"))
                gate, up = (self.bf_if("routed gate and up rounded", y) for y in (gate, up))
                act = bf(silu(gate) * up)
                out[t] += w * bf(act @ p[name + "experts.down_proj.weight"][e].T)
        routed = self.bf_unless("routed sum not rounded before the shared add", out)
        return bf(routed + self.swiglu(x, name + "shared_expert."))

    def layer(self, i, x, residual):
        """One decoder layer: x, residual [tokens, hidden] -> the same."""
        name = f"layers.{i}."
        y, residual = self.add_norm(x, residual, self.p[name + "input_layernorm.weight"])
        x = self.attention(y, i)
        y, residual = self.add_norm(x, residual, self.p[name + "post_attention_layernorm.weight"])
        return (self.moe if self.c.sparse_layers[i] else self.swiglu)(y, name + "mlp."), residual
