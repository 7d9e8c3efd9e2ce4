"""The settings beside a tokenizer: which tokens end an answer, the chat template, default sampling values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve.text.chat_template import check_template

# Special tokens that chat templates refer to by name.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class UnusableFile(ValueError):
    """A file beside the tokenizer that cannot be used; the message names it."""

    def __init__(self, file: Path, reason: str):
        super().__init__(f"{file} cannot be used with the tokenizer: {reason}")


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
        ValueError: the file holds no JSON object, or `eos_token_id` is neither an integer nor a list of integers.
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
    """Reads chat_template.jinja, tokenizer_config.json, special_tokens_map.json, generation_config.json.

    Raises:
        UnusableFile: one of them is malformed.
    """
    map_file, config_file = folder / "special_tokens_map.json", folder / "tokenizer_config.json"
    mapped, config = read_json(map_file), read_json(config_file)
    texts = {name: _token_text(name, token, map_file) for name, token in mapped.items() if name in _NAMED_TOKENS}
    texts |= {name: _token_text(name, token, config_file) for name, token in config.items() if name in _NAMED_TOKENS}
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        template = read_text(template_file)
    else:
        template_file, template = config_file, default_template(config.get("chat_template"), config_file)
    if template is not None:
        try:
            check_template(template)
        except ValueError as error:
            raise UnusableFile(template_file, str(error)) from error
    return FolderSettings(
        chat_template=template,
        template_variables={name: text for name, text in texts.items() if text is not None},
        generation=read_generation_config(folder),
        added_tokens=_added_tokens(config, config_file),
    )


def default_template(templates: Any, file: Path) -> str | None:
    """The template meant by default: the only one, or among named ones "default", else the first."""
    if not templates:
        return None
    if isinstance(templates, str):
        return templates
    if not isinstance(templates, list) or not all(map(_is_named_template, templates)):
        raise UnusableFile(file, "chat_template must be a string or a list of objects with a name and a template")
    by_name = {entry["name"]: entry["template"] for entry in templates}
    return by_name.get("default", templates[0]["template"])


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def _added_tokens(config: Mapping[str, Any], file: Path) -> dict[int, Mapping[str, Any]]:
    added = config.get("added_tokens_decoder", {})
    try:
        tokens: dict[int, Any] = {int(i): token for i, token in added.items()}
    except (AttributeError, ValueError):
        tokens = {-1: None}
    if not all(i >= 0 and isinstance(t, dict) and isinstance(t.get("content"), str) for i, t in tokens.items()):
        raise UnusableFile(file, "added_tokens_decoder must map token ids to objects with a content")
    return tokens


def _token_text(name: str, token: Any, file: Path) -> str | None:
    """A special token is listed as its text or as an object with its properties."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if text is not None and not isinstance(text, str):
        raise UnusableFile(file, f"{name} must be a string or an object with a content, not {token!r:.100}")
    return text


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not file.is_file():
        return {}
    text = read_text(file)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise (
            error if isinstance(error, UnusableFile) else UnusableFile(file, f"it is no valid JSON: {error}")
        ) from error
    if not isinstance(content, dict):
        raise UnusableFile(file, f"it must hold a JSON object, not a {type(content).__name__}")
    return content


def read_text(file: Path) -> str:
    """A file's text; raises UnusableFile."""
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableFile(file, f"it cannot be read: {error}") from error
