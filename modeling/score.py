"""Teacher-forced logits of token ids: `python -m modeling.score DIR --tokens ids.npy --out out.npz`.

Runs the engine's own path, a chunk at a time against a paged cache, so that any length fits; it is what the engine's
tokens are compared with.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeling.default import DEFAULT_CHECKPOINT

if TYPE_CHECKING:
    from modeling.flint.model import Flint

CHUNK_TOKENS = 512  # tokens of all rows that one step runs


def score(model: Flint, tokens: np.ndarray) -> np.ndarray:
    """Logits after every position.

    Args:
        tokens: [batch, seq] integer ids.

    Returns:
        [batch, seq, vocab_size] float32.
    """
    rows = max(1, min(tokens.shape[0], CHUNK_TOKENS // tokens.shape[1]))
    groups = [_score_rows(model, tokens[i : i + rows]) for i in range(0, tokens.shape[0], rows)]
    return np.concatenate(groups)


@functools.lru_cache(maxsize=8)
def _step(treedef: Any) -> Callable[..., Any]:
    """The jitted step of models of this structure; kept, so that scoring again compiles nothing."""
    import jax

    from modeling.batch import Batch

    @functools.partial(jax.jit, donate_argnums=1)
    def step(leaves, cache, tokens, start, length, pages):
        model = jax.tree.unflatten(treedef, leaves)
        rows = tokens.shape[0]
        batch = Batch(tokens, start[None].repeat(rows), length[None].repeat(rows), pages)
        hidden, cache = model.forward(batch, cache)
        return model.logits(hidden), cache

    return step


def _score_rows(model: Flint, tokens: np.ndarray) -> np.ndarray:
    import jax

    from modeling.cache import CacheShape, consecutive_pages, make_cache

    batch, seq = tokens.shape
    chunk = min(seq, max(1, CHUNK_TOKENS // batch))
    shape = CacheShape.for_sequences(model.config, batch, seq, chunk)
    pages = consecutive_pages(shape)
    cache = make_cache(model.config, shape, model.dtype)
    leaves, treedef = jax.tree.flatten(model)
    out = np.empty((batch, seq, model.config.vocab_size), np.float32)
    for start in range(0, seq, chunk):
        length = min(chunk, seq - start)
        part = np.zeros((batch, chunk), np.int32)
        part[:, :length] = tokens[:, start : start + length]
        logits, cache = _step(treedef)(leaves, cache, part, np.int32(start), np.int32(length), pages)
        out[:, start : start + length] = np.asarray(logits)[:, :length]
    return out


def read_tokens(path: Path) -> np.ndarray:
    """Token ids [batch, seq] of a .npy file (a single row may be 1-D).

    Raises:
        ValueError: not such a file; says what it must hold.
    """
    try:
        tokens = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (ValueError, EOFError, OSError, MemoryError, OverflowError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a .npy array: {error}") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim not in (1, 2) or tokens.dtype.kind not in "iu":
        raise ValueError(f"{path} must hold integer token ids, [batch, seq]")
    if tokens.size == 0:
        raise ValueError(f"{path} holds no tokens")
    return np.atleast_2d(tokens)


def check_tokens(tokens: np.ndarray, vocab_size: int, max_len: int) -> None:
    """Raises ValueError where ids or lengths are out of the model's range."""
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"token ids run from {tokens.min()} to {tokens.max()}; the model has 0..{vocab_size - 1}")
    if tokens.shape[1] > max_len:
        raise ValueError(f"rows of {tokens.shape[1]} tokens exceed the model's context of {max_len}")


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 2 with one sentence where the input is unusable."""
    parser = argparse.ArgumentParser(prog="python -m modeling.score", description=__doc__)
    parser.add_argument(
        "checkpoint", nargs="?", default=DEFAULT_CHECKPOINT, help="folder, .gguf file or hub repository id"
    )
    parser.add_argument("--config", help="folder, config.json or repository with the config, where a GGUF has none")
    parser.add_argument(
        "--tokens", type=Path, required=True, help=".npy of integer token ids, [batch, seq] or one row [seq]"
    )
    parser.add_argument("--out", type=Path, required=True, help=".npz to write; holds `logits` [batch, seq, vocab]")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="compute dtype")
    parser.add_argument("--media", type=Path, help="media inputs, for models that take them")
    parser.add_argument(
        "--mtp", action="store_true", help="also the multi-token-prediction logits, where a model has them"
    )
    args = parser.parse_args(argv)
    try:
        if args.media or args.mtp:
            raise ValueError("Flint takes no media and has no multi-token prediction; leave --media and --mtp out")
        if not args.out.parent.is_dir() or args.out.is_dir():
            raise ValueError(f"--out {args.out} must name a file in a folder that exists")
        tokens = read_tokens(args.tokens)

        from modeling import load

        model = load(args.checkpoint, dtype=args.dtype, config=args.config)
        check_tokens(tokens, model.config.vocab_size, model.config.max_position_embeddings)
        logits = score(model, tokens)
        with args.out.open("wb") as file:  # np.savez would append .npz to another name
            np.savez(file, logits=logits)
        print(f"wrote {args.out}: logits {list(logits.shape)} float32")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # extension modules swallow KeyboardInterrupt while they load
    sys.exit(main())
