"""Trains the tiny Inkling: AdamW on float32 weights, bf16 compute, one device.

    python -m checkpoints.training.inkling.train --out RUN --minutes 9.5

Trunk, towers and drafting depths are trained together; the depths' loss reaches the trunk too, which learns to look
ahead. The router's bias is no weight: after each step it moves towards equal loads. The learning rate warms up and then
falls linearly to zero over the steps or the minutes given, whichever end first. In the last part every other step
computes with routed experts that went through NVFP4 and back, so that the weights serve both formats.
"""

import argparse
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.training.inkling.evaluate import Scores, evaluate
from checkpoints.training.inkling.forward import Params, Rows, cast, forward, init, is_packed, logits_of
from checkpoints.training.inkling.pack import Packed, batches, held_out_batches
from checkpoints.training.inkling.shape import VISION
from checkpoints.training.inkling.shape import config as make_config
from checkpoints.training.train import learning_rate, load, optimizer, save
from modeling.inkling.config import InklingConfig

PROMPT_WEIGHT = 0.02  # of the loss on tokens that the model need not produce
DEPTHS_WEIGHT = 0.3  # of the mean loss of the drafting depths
BIAS_RATE = 0.3  # of the learning rate: how far a step moves the router's bias
LAST_SECONDS = 15  # kept for the evaluation at the end


def rows_of(packed: Packed) -> Rows:
    """What the forward pass takes."""
    return Rows(packed.tokens, packed.segments, packed.patches, packed.patch_at, packed.frames, packed.frame_at)  # pyright: ignore[reportArgumentType]


def blend(params: Params, dtype: Any, quantise: jax.Array) -> Params:
    """Parameters to compute with; `quantise` (0 or 1, traced) chooses between plain and through NVFP4."""
    plain, packed = cast(params, dtype), cast(params, dtype, quantise=True)
    return {name: jnp.where(quantise > 0, packed[name], plain[name]) if is_packed(name) else plain[name]
            for name in params}  # fmt: skip


def loss_of(
    params: Params, rows: Rows, produced: jax.Array, quantise: jax.Array, config: InklingConfig, dtype: Any
) -> tuple[jax.Array, tuple[dict[str, jax.Array], jax.Array]]:
    """Cross entropies of the next token and of those the depths draft, mostly on what the model must produce."""
    weights = blend(params, dtype, quantise)
    out = forward(weights, rows, config)
    tokens, segments = rows.tokens.astype(jnp.int32), rows.segments.astype(jnp.int32)
    losses, metrics = [], {}
    for n, hidden in enumerate(out.hidden):
        ahead = n + 1
        logits = logits_of(weights, hidden[:, :-ahead], config)
        target = tokens[:, ahead:]
        same = (segments[:, ahead:] == segments[:, :-ahead]) & (target > 0) & (segments[:, ahead:] > 0)
        picked = (logits * jax.nn.one_hot(target, logits.shape[-1])).sum(-1)
        error = jax.nn.logsumexp(logits, -1) - picked
        wanted = same & produced[:, ahead:]
        weight = jnp.where(wanted, 1.0, PROMPT_WEIGHT) * same
        losses.append((error * weight).sum() / jnp.maximum(weight.sum(), 1.0))
        count = jnp.maximum(wanted.sum(), 1)
        metrics[f"loss{n}"] = (error * wanted).sum() / count
        metrics[f"right{n}"] = ((logits.argmax(-1) == target) & wanted).sum() / count
    loss = losses[0] + DEPTHS_WEIGHT * sum(losses[1:]) / max(1, len(losses) - 1)
    metrics["load"] = out.loads.max() * config.num_experts / config.num_experts_per_tok
    return loss, (metrics, out.loads)


class Trainer:
    """The parameters, the optimizer's state and the compiled step."""

    def __init__(self, params: Params, config: InklingConfig, dtype: Any, weight_decay: float = 0.05):
        self.params = params
        rule = optimizer(weight_decay)
        self.state = rule.init(params)
        biases = [name for name in params if name.endswith(".gate.bias")]

        def step(params, state, rows, produced, quantise, rate):
            lossy = functools.partial(loss_of, config=config, dtype=dtype)
            grads, (metrics, loads) = jax.grad(lossy, has_aux=True)(params, rows, produced, quantise)
            updates, state = rule.update(grads, state, params)
            params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
            for name, shares in zip(biases, loads, strict=True):
                params[name] += BIAS_RATE * rate * jnp.sign(shares.mean() - shares)
            return params, state, metrics

        def choose(params, rows, quantise):
            weights = blend(params, dtype, quantise)
            hidden = forward(weights, rows, config).hidden
            return jnp.stack([logits_of(weights, h, config).argmax(-1) for h in hidden]).astype(jnp.uint16)

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._choose = jax.jit(choose)

    def step(self, batch: Packed, rate: float, quantise: bool = False) -> dict[str, jax.Array]:
        """One update; the metrics are not waited for."""
        self.params, self.state, metrics = self._step(
            self.params, self.state, rows_of(batch), batch.produced, np.float32(quantise), np.float32(rate)
        )
        return metrics

    def evaluate(self, held: list[Packed], quantise: bool) -> Scores:
        """Scores with plain bf16 weights, or with weights through NVFP4."""
        return evaluate(lambda p: np.asarray(self._choose(self.params, rows_of(p), np.float32(quantise))), held)


def show(name: str, scores: Scores) -> None:
    """Means, and the kinds that are not there yet."""
    weak = sorted((score, kind) for kind, score in scores.right.items() if score < 0.98)
    accepted = np.mean(list(scores.accepted.values())) if scores.accepted else 0
    print(f"  {name}: mean {np.mean(list(scores.right.values())):.4f}; accepted a round {accepted:.2f} of "
          f"{len(scores.by_depth)}, by depth {' '.join(f'{share:.2f}' for share in scores.by_depth)}; "
          f"{len(weak)} kinds below 98%: " + ", ".join(f"{kind} {score:.2f}" for score, kind in weak[:20]),
          flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for params.npz and log.jsonl")
    parser.add_argument("--init", type=Path, help="params.npz to continue from")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=1e9, help="of the whole program, from start to end")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument(
        "--quantise-from", type=float, default=0.6, help="progress after which every other step is NVFP4"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--eval-seconds", type=float, default=75)
    parser.add_argument("--eval-per-kind", type=int, default=48)
    args = parser.parse_args()
    deadline = time.time() + 60 * args.minutes - LAST_SECONDS
    args.out.mkdir(parents=True, exist_ok=True)
    config = make_config()
    source = batches(args.seed, args.rows, args.length, args.workers)
    next(source)  # starts the workers
    params = load(args.init) if args.init else init(config, VISION, args.seed)
    trainer = Trainer(params, config, jnp.dtype(args.dtype))
    print(f"{sum(p.size for p in trainer.params.values())} parameters on {jax.devices()[0].device_kind}", flush=True)
    run(args, trainer, source, held_out_batches(args.eval_per_kind, args.rows, args.length), deadline)


def run(args: argparse.Namespace, trainer: Trainer, source: Any, held: list[Packed], deadline: float) -> None:
    """The loop: steps, a line every few seconds, an evaluation and saved parameters every now and then."""
    began = time.time()
    trainer.step(next(source), 0.0)["load"].block_until_ready()
    print(f"step compiled in {time.time() - began:.1f} s", flush=True)
    trainer.evaluate(held, False)
    print(f"compiled in {time.time() - began:.1f} s", flush=True)
    began = told = evaluated = time.time()
    waited, last = 0.0, 0
    log = (args.out / "log.jsonl").open("a")
    for step in range(args.steps):
        progress = max(step / args.steps, (time.time() - began) / (deadline - began))
        if progress >= 1:
            break
        asked = time.time()
        batch = next(source)
        waited += time.time() - asked
        rate = learning_rate(step, progress, args.rate, args.warmup)
        metrics = trainer.step(batch, rate, progress > args.quantise_from and step % 2 == 1)
        if step % 25 == 0 and time.time() - told > 8:
            values = {name: round(float(value), 4) for name, value in metrics.items()}
            speed = (step - last) * args.rows * args.length / (time.time() - told)
            line = {"step": step, "seconds": round(time.time() - began, 1), "rate": round(rate, 6), **values}
            print(json.dumps(line), f"{speed / 1e6:.2f} M tokens/s, waited {waited:.1f} s", flush=True)
            log.write(json.dumps(line) + "\n")
            told, last = time.time(), step
        if time.time() - evaluated > args.eval_seconds:
            show("bf16", trainer.evaluate(held, False))
            show("nvfp4", trainer.evaluate(held, True))
            save(args.out / "params.npz", trainer.params)
            evaluated = time.time()
    save(args.out / "params.npz", trainer.params)
    for name, quantise in (("bf16", False), ("nvfp4", True)):
        scores = trainer.evaluate(held, quantise)
        show(name, scores)
        log.write(json.dumps({"final": name, **scores._asdict()}) + "\n")
    log.close()


if __name__ == "__main__":
    main()
