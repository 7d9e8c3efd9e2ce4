"""Trains the tiny Flint: AdamW on float32 weights, bf16 compute, one device.

    python -m checkpoints.training.train --out RUN --minutes 9

The learning rate warms up and then falls linearly to zero over the steps or the minutes given, whichever end first.
In the last part every other step computes with weights that went through NVFP4 and back, so that the weights serve
both formats.
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
import optax

from checkpoints.training.evaluate import accuracy
from checkpoints.training.forward import Params, cast, forward, init
from checkpoints.training.pack import Packed, batches, held_out_batch
from checkpoints.training.shape import config as make_config
from modeling.flint.config import FlintConfig

PROMPT_WEIGHT = 0.02  # of the loss on tokens that the model need not produce
BALANCE_WEIGHT = 0.005


def optimizer(weight_decay: float) -> optax.GradientTransformation:
    """AdamW without its learning rate, which the trainer multiplies in."""
    matrices = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(weight_decay, mask=matrices),
    )


def blend(params: Params, dtype: Any, quantise: jax.Array) -> Params:
    """Parameters to compute with; `quantise` (0 or 1, traced) chooses between plain and through NVFP4."""
    plain, packed = cast(params, dtype), cast(params, dtype, quantise=True)
    return {name: jnp.where(quantise > 0, packed[name], plain[name]) for name in params}


def loss_of(
    params: Params, tokens: jax.Array, segments: jax.Array, produced: jax.Array, quantise: jax.Array,
    config: FlintConfig, dtype: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
    """Cross entropy of the next token, mostly on what the model must produce."""
    tokens, segments = tokens.astype(jnp.int32), segments.astype(jnp.int32)
    logits, balance = forward(blend(params, dtype, quantise), tokens, segments, config)
    target, logits = tokens[:, 1:], logits[:, :-1]
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    picked = (logits * jax.nn.one_hot(target, config.vocab_size)).sum(-1)
    error = jax.nn.logsumexp(logits, -1) - picked
    wanted = same & produced[:, 1:]
    weight = jnp.where(wanted, 1.0, PROMPT_WEIGHT) * same
    loss = (error * weight).sum() / jnp.maximum(weight.sum(), 1.0)
    count = jnp.maximum(wanted.sum(), 1)
    right = ((logits.argmax(-1) == target) & wanted).sum() / count
    answer = (error * wanted).sum() / count
    return loss + BALANCE_WEIGHT * balance, {"answer_loss": answer, "token_accuracy": right, "balance": balance}


class Trainer:
    """The parameters, the optimizer's state and the compiled step."""

    def __init__(self, params: Params, config: FlintConfig, dtype: Any, weight_decay: float = 0.05):
        self.params = params
        rule = optimizer(weight_decay)
        self.state = rule.init(params)

        def step(params, state, tokens, segments, produced, quantise, rate):
            grads, metrics = jax.grad(loss_of, has_aux=True)(
                params, tokens, segments, produced, quantise, config, dtype
            )
            updates, state = rule.update(grads, state, params)
            return jax.tree.map(lambda p, u: p - rate * u, params, updates), state, metrics

        def choose(params, tokens, segments, quantise):
            weights = blend(params, dtype, quantise)
            return forward(weights, tokens.astype(jnp.int32), segments.astype(jnp.int32), config)[0].argmax(-1)

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._choose = jax.jit(choose)

    def step(self, batch: Packed, rate: float, quantise: bool = False) -> dict[str, jax.Array]:
        """One update; the metrics are not waited for."""
        self.params, self.state, metrics = self._step(
            self.params,
            self.state,
            batch.tokens,
            batch.segments,
            batch.produced,
            np.float32(quantise),
            np.float32(rate),
        )
        return metrics

    def accuracy(self, packed: Packed, rows: int, quantise: bool) -> dict[str, float]:
        """Accuracy a kind with plain bf16 weights, or with weights through NVFP4."""
        return accuracy(lambda t, s: self._choose(self.params, t, s, np.float32(quantise)), packed, rows)


def learning_rate(step: int, progress: float, peak: float, warmup: int) -> float:
    """Linear warm-up, then linear to (almost) zero at progress 1."""
    return peak * min(1.0, (step + 1) / warmup) * max(1.0 - progress, 0.002)


def save(path: Path, params: Params) -> None:
    """Parameters by name, float32."""
    with path.with_suffix(".tmp").open("wb") as file:
        arrays: dict[str, Any] = {name: np.asarray(value) for name, value in params.items()}
        np.savez(file, **arrays)
    path.with_suffix(".tmp").replace(path)


def load(path: Path) -> Params:
    """What `save` wrote."""
    with np.load(path) as file:
        return {name: jnp.asarray(file[name]) for name in file.files}


def show(name: str, scores: dict[str, float]) -> None:
    """Mean and the kinds that are not there yet."""
    weak = sorted((score, kind) for kind, score in scores.items() if score < 0.98)
    print(f"  {name}: mean {np.mean(list(scores.values())):.4f}; {len(weak)} kinds below 98%: "
          + ", ".join(f"{kind} {score:.2f}" for score, kind in weak[:16]), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for params.npz and log.jsonl")
    parser.add_argument("--init", type=Path, help="params.npz to continue from")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=1e9, help="of stepping, compilation not counted")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument(
        "--quantise-from", type=float, default=0.6, help="progress after which every other step is NVFP4"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--eval-seconds", type=float, default=60)
    parser.add_argument("--eval-per-kind", type=int, default=48)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config = make_config()
    source = batches(args.seed, args.rows, args.length, args.workers)
    next(source)  # starts the workers
    trainer = Trainer(load(args.init) if args.init else init(config, args.seed), config, jnp.dtype(args.dtype))
    print(f"{sum(p.size for p in trainer.params.values())} parameters on {jax.devices()[0].device_kind}", flush=True)
    held = held_out_batch(args.eval_per_kind, args.length)
    run(args, trainer, source, held)


def run(args: argparse.Namespace, trainer: Trainer, source: Any, held: Packed) -> None:
    """The loop: steps, a line every few seconds, an evaluation and a saved checkpoint every minute."""
    began = time.time()
    trainer.step(next(source), 0.0)["balance"].block_until_ready()
    trainer.accuracy(held, args.rows, False)
    print(f"compiled in {time.time() - began:.1f} s", flush=True)
    began = told = evaluated = time.time()
    waited, last = 0.0, 0
    log = (args.out / "log.jsonl").open("a")
    for step in range(args.steps):
        progress = max(step / args.steps, (time.time() - began) / 60 / args.minutes)
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
            show("bf16", trainer.accuracy(held, args.rows, False))
            show("nvfp4", trainer.accuracy(held, args.rows, True))
            save(args.out / "params.npz", trainer.params)
            evaluated = time.time()
    save(args.out / "params.npz", trainer.params)
    for name, quantise in (("bf16", False), ("nvfp4", True)):
        scores = trainer.accuracy(held, args.rows, quantise)
        show(name, scores)
        log.write(json.dumps({"final": name, "accuracy": scores}) + "\n")
    log.close()


if __name__ == "__main__":
    main()
