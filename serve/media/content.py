"""Pictures and sound in chat messages: taken out, and placeholders left where they were."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serve.media.audio import audio_frames
from serve.media.errors import UnusableMedia
from serve.media.format import Kind, MediaFormat
from serve.media.image import image_patches

# Type of a content part: what it carries, and the field that holds it.
_PARTS: dict[str, tuple[Kind, str]] = {
    "image": ("image", "image"),
    "image_url": ("image", "image_url"),
    "audio": ("audio", "audio"),
    "audio_url": ("audio", "audio_url"),
    "input_audio": ("audio", "input_audio"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class MediaItem:
    """One picture or clip, as a tower reads it; `rows` are those of `serve.request.Media`."""

    kind: Kind
    rows: np.ndarray


def load_media(
    messages: Sequence[Mapping[str, Any]], format: MediaFormat, *, max_tokens: int, allow_files: bool = False
) -> tuple[list[dict[str, Any]], tuple[MediaItem, ...]]:
    """Reads the pictures and clips of OpenAI chat messages. Nothing is fetched from the network.

    The parts, each with `{"url": ...}` or the string itself where a URL stands:

        {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,..."}}
        {"type": "input_audio", "input_audio": {"data": base64, "format": "wav"}}
        {"type": "image", "image": bytes, Path, PIL image or URL}
        {"type": "audio", "audio": bytes, Path or URL}

    What a file is, its content says; its MIME type or `format` is not looked at.

    Args:
        messages: left as they are.
        format: what the model reads.
        max_tokens: most tokens that all of them may become together: the context length.
        allow_files: a URL may also be a path or `file:` URL of this machine. Not for messages from strangers.

    Returns:
        The messages, with `{"type": "image" or "audio", "num_tokens": n}` for each of these parts; and the media in
        the order of their parts.

    Raises:
        UnusableMedia: the first part that cannot be read, by its place, and why.
    """
    items: list[MediaItem] = []

    def load(part: Mapping[str, Any]) -> dict[str, Any]:
        kind, field = _PARTS[part["type"]]
        if kind not in format.kinds:
            raise UnusableMedia(f"This model reads no {kind}; leave it out.")
        source = _source(part.get(field), allow_files)
        rows = image_patches(source, format) if kind == "image" else audio_frames(source, format)
        items.append(MediaItem(kind, rows))
        if (total := sum(len(item.rows) for item in items)) > max_tokens:
            raise UnusableMedia(f"With this {kind} the media are {total} tokens; the context has {max_tokens}.")
        return {"type": kind, "num_tokens": len(rows)}

    loaded: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = list(content)
            for j, part in enumerate(parts):
                if isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] in _PARTS:
                    try:
                        parts[j] = load(part)
                    except UnusableMedia as error:
                        raise UnusableMedia(f"messages[{i}].content[{j}]: {error}") from None
            content = parts
        loaded.append({**message, "content": content} if "content" in message else dict(message))
    return loaded, tuple(items)


def _source(value: Any, allow_files: bool) -> Any:
    """What `image_patches` and `audio_frames` take, out of a part's field."""
    if isinstance(value, Mapping):
        if "data" in value:
            return _decoded(value["data"])
        value = value.get("url")
    if value is None:
        raise UnusableMedia("The part is empty; give a data: URL or base64 data.")
    if isinstance(value, bytes | Path) or type(value).__module__.startswith("PIL."):  # these cannot come in by JSON
        return value
    if not isinstance(value, str):
        raise UnusableMedia(f"The part holds a {type(value).__name__}; give a data: URL or base64 data.")
    scheme = value[:5].lower()
    if scheme == "data:":
        header, comma, data = value.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise UnusableMedia("The data: URL is not of the form data:TYPE;base64,DATA.")
        return _decoded(data)
    if value.lower().startswith(("http://", "https://")):
        raise UnusableMedia("Nothing is fetched from the network; download the file and send it as a data: URL.")
    if not allow_files:
        raise UnusableMedia(
            "Files are not read by URL here; send the content as a data: URL, or in Python give a Path."
        )
    return Path(urllib.request.url2pathname(urllib.parse.urlsplit(value).path) if scheme == "file:" else value)


def _decoded(data: Any) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise UnusableMedia(f"The data are not base64 ({error}).") from None
