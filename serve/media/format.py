"""What a checkpoint wants to be given: sizes of its towers, its placeholder tokens, how it resizes pictures."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal, Self

type Kind = Literal["image", "audio"]

# PIL's filters by the numbers that processor files use.
_FILTERS = {0: "NEAREST", 1: "LANCZOS", 2: "BILINEAR", 3: "BICUBIC", 4: "BOX", 5: "HAMMING"}


@dataclasses.dataclass(frozen=True)
class ImageSettings:
    """How pictures are resized and normalised (spec 7.2). The defaults are those of a checkpoint that does not say.

    Attributes:
        rescale: factor of the long edge; None leaves pictures as they are. A checkpoint without processor settings
            gets None, like Transformers and the model's own renderer (vLLM and SGLang assume 2.0).
        max_long_edge: no picture grows beyond this many pixels; a larger one keeps its size. None means no limit.
        resample: name of PIL's filter.
        mean: of red, green and blue, on the scale 0..1.
        std: likewise.
    """

    rescale: float | None = None
    max_long_edge: int | None = 2048
    resample: str = "LANCZOS"
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From `processor_config.json` or `preprocessor_config.json` of a checkpoint; the defaults without them.

        Raises:
            ValueError: a file is no JSON, or has a value that cannot be used; the message names both.
        """
        for name in ("processor_config.json", "preprocessor_config.json"):
            if not (path := folder / name).is_file():
                continue
            try:
                content = json.loads(path.read_text())
            except ValueError as error:
                raise ValueError(f"{path} is not JSON: {error}") from None
            if isinstance(content, dict):
                content = content.get("image_processor", content)
            if isinstance(content, dict) and not content.keys().isdisjoint(_KEYS):
                return cls._from_json(content, path)
        return cls()

    @classmethod
    def _from_json(cls, content: dict[str, Any], path: Path) -> Self:
        values: dict[str, Any] = {}
        for key, (field, check) in _KEYS.items():
            if key in content:
                if not check(content[key]):
                    raise ValueError(f"{path}: {key} is {content[key]!r}, which cannot be used")
                values[field] = content[key]
        if "resample" in values:
            values["resample"] = _FILTERS[values["resample"]]
        for field in ("mean", "std"):
            if field in values:
                values[field] = tuple(map(float, values[field]))
        return cls(**values)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _colour(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(isinstance(x, int | float) for x in value)


# Key of a processor file: field here, and whether a value can be used.
_KEYS = {
    "rescale_image_frac": ("rescale", lambda value: value is None or _positive(value)),
    "rescale_image_max_upscaled_long_edge": ("max_long_edge", lambda value: value is None or _positive(value)),
    "resample": ("resample", lambda value: value in _FILTERS),
    "image_mean": ("mean", _colour),
    "image_std": ("std", lambda value: _colour(value) and all(map(_positive, value))),
}


@dataclasses.dataclass(frozen=True)
class MediaFormat:
    """The media that a model reads. The numbers are the released checkpoints'.

    Attributes:
        image_token_id: stands for one patch; None if the model reads no pictures.
        audio_token_id: stands for one frame; None if the model reads no sound.
        patch_size: edge of a patch, pixels.
        temporal_patch_size: how often a still picture is repeated in time.
        num_mel_bins: frequency bands of a frame.
        mel_vocab_size: steps of the logarithm in a band, at most 256.
        dmel_min_value: log10 of the lowest step; dmel_max_value: of the highest.
        image: resizing and normalisation.
    """

    image_token_id: int | None
    audio_token_id: int | None
    patch_size: int = 40
    temporal_patch_size: int = 2
    num_mel_bins: int = 80
    mel_vocab_size: int = 16
    dmel_min_value: float = -7.0
    dmel_max_value: float = 2.0
    image: ImageSettings = ImageSettings()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What the model reads beside text."""
        found: list[Kind] = []
        if self.image_token_id is not None:
            found.append("image")
        if self.audio_token_id is not None:
            found.append("audio")
        return tuple(found)
