"""Inkling in plain numpy, float64 sums, with every rule and rounding point of the spec as a switch.

Written from the published rules alone, sharing nothing with `modeling`. A switch named in `wrong` replaces one rule by
the mistake an implementation could make there, so that a test can show that it would notice. Without `rounding` it is
the unrounded truth.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

ATTENTION_MISTAKES = (
    "scale of 1 / sqrt(d)",
    "bias multiplied by the scale",
    "bias clamped beyond its extent",
    "bias reversed",
    "bias from the start of the sequence",
    "window one short",
    "window one long",
    "tau in sliding layers",
    "tau on the query alone",
    "tau on the bias alone",
    "tau of t instead of t + 1",
    "no tau",
    "key normed before its convolution",
    "value normed",
    "query convolved",
    "relative states convolved",
    "query heads dealt to key heads in turn",
)
CONVOLUTION_MISTAKES = (
    "no residual inside the key's convolution",
    "no residual inside the value's convolution",
    "no residual inside the attention's convolution",
    "no residual around the attention",
    "no residual inside the MLP's convolution",
    "no residual around the MLP",
    "taps reversed",
)
DENSE_MISTAKES = ("gate and up in halves", "no output_scale")
SPARSE_MISTAKES = (
    "gate and up in halves",
    "selection without the bias",
    "bias in the weights",
    "softmax of the logits",
    "normalised over the routed alone",
    "shared experts not in the sum that normalises, nor weighted",
    "shared weights exchanged",
    "no route_scale",
    "no gate_scale",
)
MODEL_MISTAKES = ("no embed_norm", "embed_norm twice", "no width multiplier", "no final norm", "embed_norm on media")
MTP_MISTAKES = (
    "hidden before the final norm",
    "embeddings without the trunk's norm",
    "embedding first",
    "embedding of the row's own token",
    "embedding of two tokens on",
    "trunk's norm before the head",
)
CHAIN_NORM_MISTAKES = ("chain norm for the head alone", "chain norm for the next depth alone", "no chain norm")
# Every value is right but for where it is rounded: (mistake, part of a layer where it shows).
ROUNDING_MISTAKES = (
    ("norm rounds before the weight", "attention"),
    ("query not rounded before tau", "attention"),
    ("query not rounded after tau", "attention"),
    ("bias not rounded", "attention"),
    ("bias not rounded before tau", "attention"),
    ("bias rounded with the score", "attention"),
    ("probabilities not rounded", "attention"),
    ("attention output not rounded", "attention"),
    ("key's convolution not rounded before its norm", "attention"),
    ("convolution rounded before its residual", "attention"),
    ("convolution rounded before its residual", "layer"),
    ("convolution not rounded before the block's residual", "layer"),
    ("norm rounds before the weight", "layer"),
    ("dense gate and up not rounded", "dense"),
    ("dense output not rounded before output_scale", "dense"),
    ("routed gate and up rounded", "sparse"),
    ("routed weight before the down projection", "sparse"),
    ("routed weights rounded", "sparse"),
    ("expert output rounded", "sparse"),
    ("routed sum not rounded", "sparse"),
    ("gamma after the down projection", "sparse"),
    ("gamma multiplies the rounded activation", "sparse"),
    ("shared outputs rounded", "sparse"),
)


def bf(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def halves(gate, up):
    """What comes of splitting a w13 with alternating rows in the middle: gate, up [..., rows, in] -> the same."""
    w13 = np.stack([gate, up], axis=-2).reshape(*gate.shape[:-2], -1, gate.shape[-1])
    return w13[..., : gate.shape[-2], :], w13[..., gate.shape[-2] :, :]


class Oracle:
    """`params` maps parameter names to float64 arrays; `wrong` names one mistake or is empty."""

    def __init__(self, config, params, wrong: str = "", rounding: bool = True):
        self.c, self.p, self.wrong, self.rounding = config, params, wrong, rounding

    def round(self, x):
        return bf(x) if self.rounding else x

    def round_unless(self, mistake, x):
        return x if self.wrong == mistake else self.round(x)

    def round_if(self, mistake, x):
        return self.round(x) if self.wrong == mistake else x

    def norm(self, x, name):
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c.rms_norm_eps)
        return self.round(self.round_if("norm rounds before the weight", y) * self.p[name + ".weight"])

    def linear(self, x, name):
        return self.round(x @ self.p[name + ".weight"].T)

    def conv(self, x, weight, rounded=True, residual=True):
        """x [tokens, channels], weight [channels, taps], the last tap on the token itself."""
        taps = weight.shape[1]
        if self.wrong == "taps reversed":
            weight = weight[:, ::-1]
        padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
        y = np.sum([weight[:, i] * padded[i : i + len(x)] for i in range(taps)], axis=0)
        y = self.round_if("convolution rounded before its residual", y)
        if residual:
            y = x + y
        return self.round(y) if rounded else y

    def heads(self, x, d):
        return x.reshape(len(x), -1, d)

    def tau(self, tokens):
        """[tokens, 1, 1] in float32 arithmetic, as the model's."""
        n = np.arange(tokens) + (0 if self.wrong == "tau of t instead of t + 1" else 1)
        ratio = np.maximum(np.float32(1), n.astype(np.float32) / np.float32(self.c.log_scaling_n_floor))
        return (1 + np.float32(self.c.log_scaling_alpha) * np.log(ratio)).astype(np.float64)[:, None, None]

    def attention(self, x, kind, name):
        """Normed x [tokens, hidden] -> the output projection's result."""
        c, tokens, sliding, wrong = self.c, len(x), kind == "sliding_attention", self.wrong
        d, num_heads = (c.swa_head_dim, c.swa_num_attention_heads) if sliding else (c.head_dim, c.num_attention_heads)
        kv_heads = c.swa_num_key_value_heads if sliding else c.num_key_value_heads
        q, k, v, r = (self.linear(x, f"{name}.{n}_proj") for n in "qkvr")
        k_taps, v_taps = (self.p[f"{name}.{n}_sconv.weight"] for n in "kv")
        if wrong == "query convolved":
            q = self.conv(q, np.resize(k_taps, (q.shape[1], k_taps.shape[1])))
        if wrong == "relative states convolved":
            r = self.conv(r, np.resize(k_taps, (r.shape[1], k_taps.shape[1])))
        if wrong == "key normed before its convolution":
            k = self.norm(self.heads(k, d), name + ".k_norm").reshape(tokens, -1)
        k = self.conv(
            k,
            k_taps,
            rounded=wrong != "key's convolution not rounded before its norm",
            residual=wrong != "no residual inside the key's convolution",
        )
        v = self.conv(v, v_taps, residual=wrong != "no residual inside the value's convolution")
        q, k, v, r = self.heads(q, d), self.heads(k, d), self.heads(v, d), self.heads(r, c.d_rel)
        scaled = (not sliding and c.log_scaling_n_floor is not None) or (wrong == "tau in sliding layers" and sliding)
        if wrong == "query not rounded before tau" and scaled:
            q = q / np.sqrt((q * q).mean(-1, keepdims=True) + c.rms_norm_eps) * self.p[name + ".q_norm.weight"]
        else:
            q = self.norm(q, name + ".q_norm")
        if wrong != "key normed before its convolution":
            k = self.norm(k, name + ".k_norm")
        if wrong == "value normed":
            v = self.norm(v, name + ".k_norm")
        rel = r @ self.p[name + ".rel_proj"]
        if wrong != "bias not rounded":
            rel = rel if wrong == "bias not rounded before tau" and scaled else self.round(rel)
        if scaled and wrong != "no tau":
            tau = self.tau(tokens)
            if wrong != "tau on the bias alone":
                q = self.round_unless("query not rounded after tau", q * tau)
            if wrong != "tau on the query alone":
                rel = self.round_unless("bias not rounded", rel * tau)
        window = c.sliding_window if sliding else tokens
        window += {"window one short": -1, "window one long": 1}.get(wrong, 0) if sliding else 0
        distance = np.arange(tokens)[:, None] - np.arange(tokens)
        seen = (distance >= 0) & (distance < window)
        scale = d**-0.5 if wrong == "scale of 1 / sqrt(d)" else 1 / d
        out = np.zeros((tokens, num_heads, d))
        for h in range(num_heads):
            g = h % kv_heads if wrong == "query heads dealt to key heads in turn" else h // (num_heads // kv_heads)
            s = (q[:, h] @ k[:, g].T) * scale + self.bias(rel[:, h], distance, scale)
            s = np.where(seen, self.round_if("bias rounded with the score", s), -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True))
            # Kernels round the exponentials, not the probabilities; their sum is taken before.
            out[:, h] = self.round_unless("probabilities not rounded", p) @ v[:, g] / p.sum(-1, keepdims=True)
        out = self.round_unless("attention output not rounded", out)
        return self.linear(out.reshape(tokens, -1), name + ".o_proj")

    def bias(self, rel, distance, scale):
        """rel [tokens, extent], distance [tokens, keys] -> [tokens, keys]."""
        tokens, extent = rel.shape
        if self.wrong == "bias from the start of the sequence":
            distance = np.broadcast_to(np.arange(distance.shape[1]), distance.shape)
        index = np.clip(distance, 0, extent - 1)
        if self.wrong == "bias reversed":
            index = extent - 1 - index
        inside = (distance < extent) | (self.wrong == "bias clamped beyond its extent")
        bias = np.where(inside, rel[np.arange(tokens)[:, None], index], 0)
        return bias * scale if self.wrong == "bias multiplied by the scale" else bias

    def gate_up(self, name):
        gate, up = (self.p[f"{name}.{n}_proj.weight"] for n in ("gate", "up"))
        return halves(gate, up) if self.wrong == "gate and up in halves" else (gate, up)

    def dense(self, x, name):
        gate, up = (self.round_unless("dense gate and up not rounded", x @ w.T) for w in self.gate_up(name))
        y = self.round(silu(gate) * up) @ self.p[name + ".down_proj.weight"].T
        y = self.round_unless("dense output not rounded before output_scale", y)
        return y if self.wrong == "no output_scale" else self.round(y * self.p[name + ".output_scale"])

    def route(self, x, name):
        """One token's routed experts, their weights, and the shared experts' weights."""
        c, p, wrong = self.c, self.p, self.wrong
        logits, bias = p[name + ".gate"] @ x, p[name + ".gate_bias"]
        scores = sigmoid(logits)
        selection = scores[: c.num_experts] + (0 if wrong == "selection without the bias" else bias)
        chosen = np.argsort(-selection, kind="stable")[: c.num_experts_per_tok]
        active = np.concatenate([chosen, c.num_experts + np.arange(c.num_shared_experts)])
        weights = scores[active]
        if wrong == "softmax of the logits":
            weights = np.exp(logits[active])
        if wrong == "bias in the weights":
            weights[: len(chosen)] += bias[chosen]
        only_routed = (
            "normalised over the routed alone",
            "shared experts not in the sum that normalises, nor weighted",
        )
        weights = weights / (weights[: len(chosen)] if wrong in only_routed else weights).sum()
        if wrong == "shared experts not in the sum that normalises, nor weighted":
            weights[len(chosen) :] = 1
        weights *= (1 if wrong == "no route_scale" else c.route_scale) * (
            1 if wrong == "no gate_scale" else p[name + ".gate_scale"]
        )
        routed, shared = weights[: len(chosen)], weights[len(chosen) :]
        return chosen, routed, shared[::-1] if wrong == "shared weights exchanged" else shared

    def sparse(self, x, name):
        out = np.zeros_like(x)
        gates, ups = self.gate_up(name + ".experts")
        shared_gates, shared_ups = self.gate_up(name + ".shared_experts")
        downs, shared_downs = (self.p[f"{name}.{n}.down_proj.weight"] for n in ("experts", "shared_experts"))
        for t, token in enumerate(x):
            chosen, weights, gammas = self.route(token, name)
            routed, shared = np.zeros(x.shape[1]), np.zeros(x.shape[1])
            weights = self.round_if("routed weights rounded", weights)
            for e, w in zip(chosen, weights, strict=True):
                gate, up = (self.round_if("routed gate and up rounded", m[e] @ token) for m in (gates, ups))
                if self.wrong == "routed weight before the down projection":
                    routed += downs[e] @ self.round(w * silu(gate) * up)
                else:
                    routed += w * self.round_if("expert output rounded", downs[e] @ self.round(silu(gate) * up))
            for e, w in enumerate(gammas):
                act = silu(shared_gates[e] @ token) * (shared_ups[e] @ token)
                if self.wrong == "gamma after the down projection":
                    y = w * (shared_downs[e] @ self.round(act))
                else:
                    y = shared_downs[e] @ self.round(w * self.round_if("gamma multiplies the rounded activation", act))
                shared += self.round_if("shared outputs rounded", y)
            out[t] = self.round(self.round_unless("routed sum not rounded", routed) + shared)
        return out

    def mlp(self, x, name):
        return (self.sparse if name + ".gate" in self.p else self.dense)(x, name)

    def layer(self, h, kind, name):
        """One decoder layer: the stream h [tokens, hidden] -> the same."""
        rounded = self.wrong != "convolution not rounded before the block's residual"
        for part, of in (("attn", "attention"), ("mlp", "MLP")):
            x = self.norm(h, f"{name}.{part}_norm")
            x = self.attention(x, kind, name + ".attn") if part == "attn" else self.mlp(x, name + ".mlp")
            inner = self.wrong != f"no residual inside the {of}'s convolution"
            x = self.conv(x, self.p[f"{name}.{part}_sconv.weight"], rounded, inner)
            h = self.round(x if self.wrong == f"no residual around the {of}" else h + x)
        return h

    def embedded(self, tokens, media=None):
        """tokens [tokens] -> [tokens, hidden]; `media` maps positions to tower outputs."""
        h = self.p["embed.weight"][tokens]
        if self.wrong not in ("no embed_norm", "embeddings without the trunk's norm"):
            h = self.norm(h, "embed_norm")
        if self.wrong == "embed_norm twice":
            h = self.norm(h, "embed_norm")
        for position, row in (media or {}).items():
            h[position] = self.norm(row, "embed_norm") if self.wrong == "embed_norm on media" else row
        return h

    def hidden(self, tokens, media=None, final_norm=True):
        h = self.embedded(tokens, media)
        for i, kind in enumerate(self.c.layer_types):
            h = self.layer(h, kind, f"layers.{i}")
        return self.norm(h, "norm") if final_norm and self.wrong != "no final norm" else h

    def logits(self, hidden):
        mup = 1 if self.wrong == "no width multiplier" else self.c.logits_mup_width_multiplier
        return (hidden @ self.p["unembed.weight"][: self.c.kept_vocab_size].T) / mup

    def depths(self, hidden: np.ndarray, embeds: np.ndarray):
        """What every depth gives to the head, from the trunk's hidden states and embeddings, [seq, hidden] each."""
        out, wrong, chain = [], self.wrong, "mtp.chain_norm.weight" in self.p
        for n, kind in enumerate(self.c.mtp.layer_types):
            name, rows = f"mtp.layers.{n}", len(embeds) - 1 - n
            ahead = n + {"embedding of the row's own token": 0, "embedding of two tokens on": 2}.get(wrong, 1)
            pair = [
                self.norm(hidden[:rows], name + ".hidden_norm"),
                self.norm(np.resize(embeds[ahead:], (rows, embeds.shape[1])), name + ".embed_norm"),
            ]
            joined = np.concatenate(pair[::-1] if wrong == "embedding first" else pair, axis=-1)
            raw = self.layer(self.linear(joined, name + ".input_proj"), kind, name + ".block")
            normed = self.norm(raw, "mtp.chain_norm") if chain and wrong != "no chain norm" else raw
            if wrong == "trunk's norm before the head":
                out.append(self.norm(raw, "norm"))
            else:
                out.append(raw if wrong == "chain norm for the next depth alone" else normed)
            hidden = raw if wrong == "chain norm for the head alone" else normed
        return out


class TowerOracle(Oracle):
    """The two towers; `wrong` as for `Oracle`, with these mistakes."""

    MISTAKES = ("fold with time fastest", "fold with columns before rows", "fold with channels slowest", "tanh GELU")
    ROUNDING_MISTAKES = ("norms round once", "linear not rounded", "activation not rounded", "sum not rounded")

    def tower_norm(self, x, name):
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return self.round(self.round_unless("norms round once", y) * self.p[name + ".weight"])

    def fold(self, x, time, space):
        """One block at a time: x [time, height, width, channels] -> fewer positions, more channels."""
        out = np.zeros((x.shape[0] // time, x.shape[1] // space, x.shape[2] // space, x.shape[3] * time * space**2))
        order = {
            "fold with time fastest": (1, 2, 3, 0),
            "fold with columns before rows": (0, 2, 1, 3),
            "fold with channels slowest": (3, 0, 1, 2),
        }.get(self.wrong, (0, 1, 2, 3))
        for t, y, z in np.ndindex(*out.shape[:3]):
            block = x[t * time : (t + 1) * time, y * space : (y + 1) * space, z * space : (z + 1) * space]
            out[t, y, z] = block.transpose(order).reshape(-1)
        return out

    def picture(self, patch, folds):
        """One patch [time, height, width, channels] -> [hidden]; `folds` lists (time, space) a layer."""
        x = patch
        for i, (time, space) in enumerate(folds):
            x = self.fold(x, time, space) @ self.p[f"vision.linears.{i}.weight"].T
            x = self.round_unless("linear not rounded", x)
            if i < len(folds) - 1:
                x = self.tower_norm(x, f"vision.norms.{i}")
                x = self.round_unless("activation not rounded", (gelu_tanh if self.wrong == "tanh GELU" else gelu)(x))
        return self.tower_norm(x.reshape(-1), "vision.final_norm")

    def sound(self, bins):
        """One frame's bins [mel_bins] -> [hidden]."""
        table = self.p["audio.encoder.weight"].reshape(len(bins), -1, self.c.hidden_size)
        total = table[np.arange(len(bins)), bins].sum(0)
        return self.tower_norm(self.round_unless("sum not rounded", total), "audio.final_norm")
