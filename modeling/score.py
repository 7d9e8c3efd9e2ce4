"""Teacher-forced logits of token ids: `python -m modeling.score DIR --tokens ids.npy --out out.npz`.

Runs the engine's own path, a chunk at a time against a paged cache, so that any length fits; it is what the engine's
tokens are compared with.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from modeling.default import DEFAULT_CHECKPOINT

if TYPE_CHECKING:
    from modeling.architecture import Model

CHUNK_TOKENS = 512  # tokens of all rows that one step runs


class Media(NamedTuple):
    """Media of all rows: tower outputs [batch, seq, hidden_size] and where they go, [batch, seq] bool."""

    embeds: np.ndarray
    here: np.ndarray


class Scores(NamedTuple):
    """Float32 logits after every position [batch, seq, vocab]; of depth n [batch, seq - 1 - n, vocab]."""

    logits: np.ndarray
    mtp_logits: list[np.ndarray]


def score(model: Model, tokens: np.ndarray, media: Media | None = None, *, mtp: bool = False) -> Scores:
    """Logits after every position.

    Args:
        tokens: [batch, seq] integer ids.
        media: what replaces the embeddings of placeholders, see `place_media`.
        mtp: also the logits of every depth the model has, where token p + 2 + n is predicted at row p.
    """
    depths = model.num_mtp_layers if mtp else 0
    rows = max(1, min(tokens.shape[0], CHUNK_TOKENS // tokens.shape[1]))
    groups = []
    for i in range(0, tokens.shape[0], rows):
        part = Media(*(array[i : i + rows] for array in media)) if media else None
        groups.append(_score_rows(model, tokens[i : i + rows], part, depths))
    columns = [np.concatenate(column) for column in zip(*groups, strict=True)]
    return Scores(columns[0], [x[:, : max(0, tokens.shape[1] - 1 - n)] for n, x in enumerate(columns[1:])])


@functools.lru_cache(maxsize=8)
def _step(treedef: Any) -> Callable[..., Any]:
    """The jitted step of models of this structure; kept, so that scoring again compiles nothing."""
    import jax

    from modeling.batch import Batch, MediaRows

    @functools.partial(jax.jit, donate_argnums=1)
    def step(leaves, cache, tokens, start, length, pages, media):
        model = jax.tree.unflatten(treedef, leaves)
        (rows, chunk), depths = tokens.shape, len(cache.drafts)
        chunk -= depths
        media = MediaRows(*media) if media else None
        here = jax.tree.map(lambda array: array[:, :chunk], media)
        batch = Batch(tokens[:, :chunk], start[None].repeat(rows), length[None].repeat(rows), pages, here)
        hidden, cache = model.forward(batch, cache)
        outs = []
        if depths:
            from modeling.inkling.layer import Step
            from modeling.inkling.mtp import prefill_depths

            outs, cache = prefill_depths(model, hidden, model.embedded(tokens, media), Step.of(batch), cache)
        return [model.logits(x) for x in (hidden, *outs)], cache

    return step


def _score_rows(model: Model, tokens: np.ndarray, media: Media | None, depths: int) -> list[np.ndarray]:
    import jax

    from modeling.cache import CacheShape, consecutive_pages, make_cache

    batch, seq = tokens.shape
    chunk = min(seq, max(1, CHUNK_TOKENS // batch))
    shape = CacheShape.for_sequences(model.config, batch, seq, chunk, depths)
    pages = consecutive_pages(shape)
    cache = make_cache(model.config, shape, model.dtype)
    leaves, treedef = jax.tree.flatten(model)
    outs = [np.empty((batch, seq, model.config.kept_vocab_size), np.float32) for _ in range(1 + depths)]
    for start in range(0, seq, chunk):
        length, end = min(chunk, seq - start), start + chunk + depths  # each depth looks one token further
        part = Media(*(_window(array, start, end) for array in media)) if media else None
        logits, cache = _step(treedef)(
            leaves,
            cache,
            _window(tokens.astype(np.int32), start, end),
            np.int32(start),
            np.int32(length),
            pages,
            tuple(part) if part else None,
        )
        for out, new in zip(outs, logits, strict=True):
            out[:, start : start + length] = np.asarray(new)[:, :length]
    return outs


def _window(array: np.ndarray, start: int, end: int) -> np.ndarray:
    """Columns start .. end - 1, zeros where there are no more."""
    part = array[:, start:end]
    padding = [(0, 0), (0, end - start - part.shape[1])] + [(0, 0)] * (array.ndim - 2)
    return np.pad(part, padding)


def place_media(model: Model, tokens: np.ndarray, arrays: Mapping[str, np.ndarray]) -> Media:
    """Runs the towers on media in the shape of public processors, and puts the outputs at their placeholders in order.

    Args:
        tokens: [batch, seq]; the model's placeholder ids mark where.
        arrays: `pixel_values` [patches, time, height, width, channels], and `audio_input_ids` [clips, frames, mel_bins]
            with `audio_input_ids_mask` [clips, frames], whichever there are.

    Raises:
        ValueError: the model has no such tower, rows of other shapes or values, or more or fewer rows than
            placeholders.
    """
    from modeling.inkling.media import embed_media
    from modeling.inkling.model import Inkling
    from modeling.inkling.towers import AudioTower

    if not isinstance(model, Inkling):
        raise ValueError("this model takes no media; leave --media out")
    config, rows = model.config, {}
    if "pixel_values" in arrays:
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            rows["image"] = arrays["pixel_values"].astype(np.float32)
    if "audio_input_ids" in arrays:
        rows["audio"] = _frames(arrays["audio_input_ids"], arrays.get("audio_input_ids_mask"))
    embeds = np.zeros((*tokens.shape, config.hidden_size), model.dtype)
    everywhere = np.zeros(tokens.shape, bool)
    for kind, token, tower in (
        ("image", config.image_token_id, model.vision),
        ("audio", config.audio_token_id, model.audio),
    ):
        count = len(rows.get(kind, ()))
        if tower is None:
            if count:
                raise ValueError(f"the checkpoint has no {kind} tower, but --media holds {count} rows for one")
            continue
        here = tokens == token
        if here.sum() != count:
            raise ValueError(f"{here.sum()} {kind} placeholders in --tokens, but {count} {kind} rows in --media")
        if not count:
            continue
        if rows[kind].shape[1:] != tower.row:
            raise ValueError(f"{kind} rows in --media must be {list(tower.row)}, not {list(rows[kind].shape[1:])}")
        if isinstance(tower, AudioTower) and not np.isin(rows[kind], np.arange(tower.mel_vocab_size)).all():
            raise ValueError(f"audio_input_ids must be in 0..{tower.mel_vocab_size - 1}, the bins that the model has")
        if not np.isfinite(rows[kind]).all():
            raise ValueError("pixel_values must be finite float32 numbers")
        embeds[here] = embed_media(model, kind, rows[kind])
        everywhere |= here
    return Media(embeds, everywhere)


def _frames(bins: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """The frames [frames, mel_bins] of all clips that are not padding."""
    mask = np.ones(bins.shape[:2]) if mask is None else mask
    if mask.shape != bins.shape[:2]:
        raise ValueError(f"audio_input_ids_mask must be {list(bins.shape[:2])}, not {list(mask.shape)}")
    return bins[mask.astype(bool)]


def read_media(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file.

    Raises:
        ValueError: not such a file, or without media in it.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # readers of archives raise whatever they stumble over
        raise ValueError(f"{path} is not an .npz of arrays: {error}") from None
    dims = {"pixel_values": 5, "audio_input_ids": 3, "audio_input_ids_mask": 2}
    if unknown := sorted(arrays.keys() - dims.keys()):
        raise ValueError(f"{path} may hold {', '.join(dims)}; not {', '.join(unknown)}")
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":  # a member may be any file
            raise ValueError(f"{name} in {path} must be an array of numbers")
        if array.ndim != dims[name]:
            raise ValueError(f"{name} in {path} must have {dims[name]} dimensions, not {array.ndim}")
    return arrays


def read_tokens(path: Path) -> np.ndarray:
    """Token ids [batch, seq] of a .npy file (a single row may be 1-D).

    Raises:
        ValueError: not such a file; says what it must hold.
    """
    try:
        tokens = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except Exception as error:  # readers of headers raise whatever they stumble over
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


def check_no_placeholders(tokens: np.ndarray, config: Any) -> None:
    """Raises ValueError where tokens stand for media, and there are none."""
    for kind in ("image", "audio"):
        token = getattr(config, f"{kind}_token_id", None)
        if token is not None and (tokens == token).any():
            raise ValueError(f"--tokens holds {kind} placeholders ({token}); give what they stand for with --media")


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
    parser.add_argument(
        "--media", type=Path, help=".npz with pixel_values, or audio_input_ids and audio_input_ids_mask, or both"
    )
    parser.add_argument(
        "--mtp", action="store_true", help="also the multi-token-prediction logits, where a model has them"
    )
    args = parser.parse_args(argv)
    try:
        if not args.out.parent.is_dir() or args.out.is_dir():
            raise ValueError(f"--out {args.out} must name a file in a folder that exists")
        tokens = read_tokens(args.tokens)
        arrays = read_media(args.media) if args.media else None

        from modeling import load

        model = load(args.checkpoint, dtype=args.dtype, config=args.config, text_only=arrays is None)
        check_tokens(tokens, model.config.vocab_size, model.config.max_position_embeddings)
        if args.mtp and not model.num_mtp_layers:
            raise ValueError("the checkpoint has no multi-token prediction; leave --mtp out")
        if arrays is None:
            check_no_placeholders(tokens, model.config)
        media = None if arrays is None else place_media(model, tokens, arrays)
        scores = score(model, tokens, media, mtp=args.mtp)
        found = {"logits": scores.logits} | {f"mtp_logits_{n}": x for n, x in enumerate(scores.mtp_logits)}
        with args.out.open("wb") as file:  # np.savez would append .npz to another name
            np.savez(file, allow_pickle=False, **found)
        print(f"wrote {args.out}: " + ", ".join(f"{name} {list(x.shape)}" for name, x in found.items()) + " float32")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # extension modules swallow KeyboardInterrupt while they load
    sys.exit(main())
