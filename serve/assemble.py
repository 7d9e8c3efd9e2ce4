"""A checkpoint on disk made ready to serve: model, engine, tokenizer and defaults, from one path."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import modeling
from modeling.architecture import Model
from modeling.default import DEFAULT_CHECKPOINT
from modeling.errors import CheckpointError
from modeling.inkling.config import InklingConfig
from modeling.inkling.model import Inkling
from modeling.loading.source import find, resolve
from serve.engine import Engine, EngineConfig
from serve.media.format import ImageSettings, MediaFormat
from serve.request import InvalidRequest, SamplingParams
from serve.text.load import find_tokenizer, load_tokenizer
from serve.text.tokenizer import Tokenizer
from serve.text.tokenizer_settings import GenerationConfig, read_generation_config
from serve.validate import check_sampling

log = logging.getLogger(__name__)

# What a checkpoint without generation_config.json is sampled with: Flint's as its authors recommend; of Inkling's no
# recommendation is published.
FLINT_SAMPLING = GenerationConfig(temperature=1.0, top_p=0.95, top_k=20)
INKLING_SAMPLING = GenerationConfig(temperature=1.0, top_p=1.0)
# What generation_config.json may set for a request; names as in `SamplingParams`.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class Assembled:
    """Everything a front end needs.

    Attributes:
        engine: not started yet.
        generation_config: default sampling values by name, for requests that give none.
        model_dir: where the model's config is; tokenizer_dir: where the tokenizer's files are.
        media_format: the pictures and sound the model reads; None if it reads text only.
    """

    engine: Engine
    tokenizer: Tokenizer
    generation_config: Mapping[str, Any]
    model_name: str
    model_dir: Path
    tokenizer_dir: Path
    media_format: MediaFormat | None = None


def assemble(
    model: str | None = None,
    *,
    tokenizer: str | None = None,
    dtype: str = "auto",
    text_only: bool = False,
    compilation_cache: str | None = None,
    progress: bool = True,
    **engine_options: Any,
) -> Assembled:
    """Loads a checkpoint and its tokenizer and builds the engine around them; starts nothing.

    Args:
        model: folder, file or hub repository id; None means the embedded checkpoint.
        tokenizer: folder or repository of the tokenizer, and of the config, where the model comes without (a GGUF
            file by itself).
        dtype: "auto" (the checkpoint's), "bfloat16" or "float32".
        text_only: leave the model's vision and audio towers out.
        compilation_cache: folder that keeps compiled programs between starts; None means firesteel's own.
        engine_options: fields of `EngineConfig`; None leaves a default.

    Raises:
        CheckpointError: the model cannot be used. ValueError: a tokenizer or option cannot. The message is for users.
    """
    use_compilation_cache(compilation_cache)
    # Its message that there is no TPU reads like a fault.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
    source = str(model or DEFAULT_CHECKPOINT)
    config_source = None
    local = resolve(source)
    if tokenizer is not None and not ((local if local.is_dir() else local.parent) / "config.json").is_file():
        config_source = tokenizer
    checkpoint = find(local, config_source)
    tokenizer_path = tokenizer_source(checkpoint.path, checkpoint.files, tokenizer)
    text = load_tokenizer(tokenizer_path)
    folder = tokenizer_path if tokenizer_path.is_dir() else tokenizer_path.parent
    is_inkling = isinstance(checkpoint.config, InklingConfig)
    own_sampling = INKLING_SAMPLING if is_inkling else FLINT_SAMPLING
    generation = generation_config(own_sampling, checkpoint.config_folder, folder)
    if text.vocab_size > checkpoint.config.vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer_path} has {text.vocab_size} tokens, the model only "
            f"{checkpoint.config.vocab_size}: they do not belong together; name the right one with --tokenizer"
        )
    defaults = dataclasses.asdict(generation)
    defaults = {name: defaults[name] for name in SAMPLING_DEFAULTS if defaults[name] is not None}
    try:
        check_sampling(SamplingParams(**defaults), text.vocab_size, num_eos=0)
    except (InvalidRequest, TypeError) as error:
        raise ValueError(f"generation_config.json of {folder} sets unusable defaults: {error}") from None
    loaded = modeling.load(
        local,
        dtype=None if dtype == "auto" else dtype,
        text_only=text_only,
        config=config_source,
        progress=progress,
    )
    options = {name: value for name, value in engine_options.items() if value is not None}
    end_ids = generation.eos_token_ids + text.eos_token_ids
    engine = Engine(loaded, EngineConfig(**options, progress=progress), end_ids)
    on_disk = model is None or Path(model).expanduser().exists()
    name = (local.stem if local.is_file() else local.resolve().name) if on_disk else str(model)
    media = media_format(loaded, checkpoint.config_folder)
    return Assembled(engine, text, defaults, name, checkpoint.config_folder, folder, media)


def media_format(model: Model, folder: Path) -> MediaFormat | None:
    """The pictures and sound that a model has towers for; None if it reads text only.

    Args:
        folder: where the checkpoint's processor settings are.

    Raises:
        ValueError: the settings cannot be used.
    """
    if not isinstance(model, Inkling) or (model.vision is None and model.audio is None):
        return None
    config, fields = model.config, {}
    if model.vision is not None and config.vision:
        fields |= dict(patch_size=config.vision.patch_size, temporal_patch_size=config.vision.temporal_patch_size)
        fields["image"] = ImageSettings.read(folder)
    if model.audio is not None and config.audio:
        fields |= dataclasses.asdict(config.audio)
    return MediaFormat(
        image_token_id=config.image_token_id if model.vision is not None else None,
        audio_token_id=config.audio_token_id if model.audio is not None else None,
        **fields,
    )


def tokenizer_source(model: Path, weight_files: tuple[Path, ...], tokenizer: str | None) -> Path:
    """Where the tokenizer is: as asked for, in the model's folder, or inside its GGUF file.

    Raises:
        CheckpointError: none of these holds one.
    """
    if tokenizer is not None:
        return resolve(tokenizer, weights=False)
    folder = model if model.is_dir() else model.parent
    gguf = weight_files[0] if weight_files and weight_files[0].suffix == ".gguf" else None
    try:
        return find_tokenizer(folder, gguf)
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointError(f"{error}; name the folder or repository of one with --tokenizer") from None


def generation_config(own: GenerationConfig, *folders: Path) -> GenerationConfig:
    """Sampling defaults of the first folder that has generation_config.json, over the model's `own`."""
    for folder in folders:
        if (folder / "generation_config.json").is_file():
            found = read_generation_config(folder)
            named = {name: value for name, value in dataclasses.asdict(found).items() if value is not None}
            return dataclasses.replace(own, **named)
    return own


def use_compilation_cache(folder: str | None) -> None:
    """Keeps compiled programs on disk, so that the next start compiles next to nothing.

    JAX_COMPILATION_CACHE_DIR goes before firesteel's own folder, an explicit `folder` before both.
    """
    own = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "firesteel" / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(folder or os.environ.get("JAX_COMPILATION_CACHE_DIR") or own))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
