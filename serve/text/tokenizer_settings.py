"""The settings beside a tokenizer: which tokens end an answer, the chat template, default sampling values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Special tokens that chat templates refer to by name.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """What a checkpoint's generation_config.json sets. None where it sets nothing.

    Attributes:
        eos_token_ids: every id that ends an answer; the file may list one or several.
        temperature, top_p, top_k, min_p, repetition_penalty: default sampling values. `do_sample: false` in the file
            is a temperature of 0, whatever else it says.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_config(path: str | Path) -> GenerationConfig:
    """Reads generation_config.json.

    Args:
        path: the file, or the folder that holds it. Without the file the result is empty.

    Raises:
        ValueError: `eos_token_id` is neither an integer nor a list of integers.
    """
    path = Path(path)
    values = read_json(path / "generation_config.json" if path.is_dir() else path)
    listed = values.get("eos_token_id")
    eos = [] if listed is None else listed if isinstance(listed, list) else [listed]
    if not all(type(i) is int for i in eos):
        raise ValueError(f"eos_token_id in {path} must be an integer or a list of integers, not {listed!r}")
    if values.get("do_sample") is False:
        values["temperature"] = 0.0
    fields = [field.name for field in dataclasses.fields(GenerationConfig) if field.name != "eos_token_ids"]
    return GenerationConfig(eos_token_ids=tuple(eos), **{name: values.get(name) for name in fields})


@dataclasses.dataclass(frozen=True)
class FolderSettings:
    """What the files beside a tokenizer say.

    Attributes:
        chat_template: Jinja source or None.
        template_variables: bos_token and the like -> text.
        generation: generation_config.json.
        added_tokens: id -> properties of tokens that tokenizer_config.json adds to the vocabulary.
    """

    chat_template: str | None
    template_variables: Mapping[str, str]
    generation: GenerationConfig
    added_tokens: Mapping[int, Mapping[str, Any]]


def read_folder_settings(folder: Path) -> FolderSettings:
    """Reads chat_template.jinja, tokenizer_config.json, special_tokens_map.json, generation_config.json."""
    config = read_json(folder / "tokenizer_config.json")
    named = read_json(folder / "special_tokens_map.json") | config
    tokens = {name: _token_text(named.get(name)) for name in _NAMED_TOKENS}
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        template = template_file.read_text("utf-8")
    else:
        template = default_template(config.get("chat_template"))
    return FolderSettings(
        chat_template=template,
        template_variables={name: text for name, text in tokens.items() if text is not None},
        generation=read_generation_config(folder),
        added_tokens={int(i): token for i, token in config.get("added_tokens_decoder", {}).items()},
    )


def default_template(templates: str | list[Mapping[str, str]] | None) -> str | None:
    """The template meant by default: the only one, or among named ones "default", else the first."""
    if not templates:
        return None
    if isinstance(templates, str):
        return templates
    by_name = {entry["name"]: entry["template"] for entry in templates}
    return by_name.get("default", templates[0]["template"])


def _token_text(token: str | Mapping[str, Any] | None) -> str | None:
    """A special token is listed as its text or as an object with its properties."""
    return token.get("content") if isinstance(token, Mapping) else token


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}
