"""Conversations to tokens and tower rows, by the code that the server uses."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import PIL.Image
from tokenizers import Tokenizer

from checkpoints.training.inkling.corpus import Asked
from checkpoints.training.inkling.shape import config_json
from checkpoints.training.inkling.tokenizer import load_tokenizer, token_id
from checkpoints.training.inkling.tones import waveform
from serve.media.dmel import dmel
from serve.media.format import MediaFormat
from serve.media.image import image_patches
from serve.text import inkling_tokens as names
from serve.text.inkling_prompt import Marker, render

MEL_BINS = 80


@dataclass
class Encoded:
    """One conversation as the model reads it.

    Attributes:
        ids: uint16 [tokens]. produced: bool [tokens], those that the model must produce.
        start: where the last turn begins, behind the role that the prompt has appended.
        patches: [image tokens, height, width, 3] bfloat16, once for both times. frames: uint8 [audio tokens, mel_bins].
        Both in the order of their placeholders.
    """

    ids: np.ndarray
    produced: np.ndarray
    start: int
    patches: np.ndarray
    frames: np.ndarray


@cache
def media_format() -> MediaFormat:
    """What the tiny model reads."""
    raw = config_json()
    return MediaFormat(raw["image_token_id"], raw["audio_token_id"], patch_size=raw["vision_config"]["patch_size"])


def tower_rows(part: dict[str, Any]) -> np.ndarray:
    """The rows of a part that holds pixels or samples."""
    if part["type"] == "image":
        return image_patches(PIL.Image.fromarray(part["image"]), media_format())
    return dmel([waveform(part["audio"])])


def loaded(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[tuple[str, np.ndarray]]]:
    """The messages with a number of placeholders for each media part; and these parts' kinds and rows."""
    found: list[tuple[str, np.ndarray]] = []

    def load(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return part
        rows = tower_rows(part)
        found.append((part["type"], rows))
        return {"type": part["type"], "num_tokens": len(rows)}

    return [
        {**m, "content": [load(part) for part in m["content"]]} if isinstance(m.get("content"), list) else m
        for m in messages
    ], found


def pieces(conversation: Asked) -> Iterator[str]:
    """Control tokens (`Marker`) and text of the whole conversation, its last turn included."""
    messages, _ = loaded([*conversation.messages, conversation.answer()])
    return render(messages, conversation.tools, conversation.effort, add_generation_prompt=False)


@cache
def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_str(load_tokenizer().to_str())
    tokenizer.encode_special_tokens = True  # what looks like a control token in a text is text
    return tokenizer


@lru_cache(1 << 14)
def _text_ids(text: str) -> list[int]:
    return _tokenizer().encode(text, add_special_tokens=False).ids


def encode(conversation: Asked) -> Encoded:
    """Tokens of prompt and answer, and which of them are learned.

    Every turn of the assistant is, but for earlier ones whose thinking was left out: the effort asks for it.
    """
    turns = [m for m in conversation.messages if m["role"] == "assistant"] + [conversation.answer()]
    learned = [bool(m.get("reasoning_content")) or conversation.effort == "none" for m in turns]
    learned[-1] = True
    messages, media = loaded([*conversation.messages, turns[-1]])
    ids: list[int] = []
    produced: list[bool] = []
    turn, inside, start = 0, False, 0
    for piece in render(messages, conversation.tools, conversation.effort, add_generation_prompt=False):
        if isinstance(piece, Marker):
            if piece == names.MODEL and not inside:
                inside, start = True, len(ids) + 1
            new = [token_id(piece)]
        else:
            new = _text_ids(piece)
        ids += new
        produced += [inside and learned[turn]] * len(new)
        if inside and isinstance(piece, Marker) and piece == names.END_TURN:
            inside, turn = False, turn + 1
    edge = media_format().patch_size
    patches = [rows[:, 0] for kind, rows in media if kind == "image"]
    frames = [rows for kind, rows in media if kind == "audio"]
    return Encoded(
        np.array(ids, np.uint16),
        np.array(produced, bool),
        start,
        np.concatenate([np.zeros((0, edge, edge, 3), np.float32), *patches]).astype(ml_dtypes.bfloat16),
        np.concatenate([np.zeros((0, MEL_BINS), np.uint8), *frames]),
    )
