"""Where a checkpoint is: a folder, a file, or a hub repository, and which files of it matter."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from modeling.config import load_config, read_json
from modeling.errors import CheckpointError
from modeling.loading.safetensors import INDEX

if TYPE_CHECKING:
    from modeling.architecture import Config

MANIFEST = "firesteel.json"  # marks a converted checkpoint
QUANTIZATION = "hf_quant_config.json"
# Everything of a checkpoint that is not weights: small, and all that a server without a model needs.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "processor_config.json",
    "preprocessor_config.json",
    "chat_template.jinja",
    "*.model",
    "tiktoken/*.model",
)
_WEIGHT_FILES = ("*.safetensors", INDEX, "*.gguf", QUANTIZATION)
_REPOSITORY = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: the folder or file it was asked for by.
        kind: how the weights are stored.
        files: the weight files; where an index exists it decides instead.
        config: the architecture. raw_config: the `config.json` it was read from. config_folder: where that is.
    """

    path: Path
    kind: Literal["safetensors", "gguf", "orbax"]
    files: tuple[Path, ...]
    config: Config
    raw_config: dict[str, Any]
    config_folder: Path


def resolve(path: str | Path, *, weights: bool = True) -> Path:
    """A local path as it is; a hub repository id `org/name` or `org/name@revision` as the folder it is downloaded to.

    Args:
        weights: False fetches only config and tokenizer files.

    Raises:
        CheckpointError: nothing on disk, and not a repository that can be fetched.
    """
    local = Path(path).expanduser()
    if local.exists():
        return local
    match = _REPOSITORY.fullmatch(str(path))
    if match is None or str(path).startswith("."):
        raise CheckpointError(f"{path} does not exist, and is not a hub repository id such as org/name")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{path} does not exist; to fetch it from the hub, install huggingface_hub (firesteel[hub])"
        ) from None
    patterns = [*SIDE_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        return Path(snapshot_download(match["repo"], revision=match["revision"], allow_patterns=patterns))
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} does not exist, and could not be fetched from the hub either: {reason}"
        ) from error


def find(path: str | Path, config: str | Path | None = None) -> Checkpoint:
    """Finds a checkpoint's weight files and reads its config.

    Args:
        path: a folder, a weight file, or a hub repository id.
        config: folder, `config.json` or repository id to read the config from instead; a GGUF file has none.

    Raises:
        CheckpointError: there is no such checkpoint, more than one, or its config cannot be used.
    """
    local = resolve(path)
    kind, files = _weight_files(local)
    folder = local if local.is_dir() else local.parent
    if config is not None:
        folder = resolve(config, weights=False)
        folder = folder if folder.is_dir() else folder.parent
    elif kind == "gguf" and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{files[0]} has no config.json beside it; a GGUF file does not describe the model, so give the folder or "
            "repository of the BF16 checkpoint as config"
        )
    return Checkpoint(local, kind, files, load_config(folder), read_json(folder / "config.json"), folder)


def _weight_files(path: Path) -> tuple[Literal["safetensors", "gguf", "orbax"], tuple[Path, ...]]:
    if path.is_file():
        if path.suffix not in (".gguf", ".safetensors"):
            raise CheckpointError(f"{path} is neither a .gguf nor a .safetensors file")
        return ("gguf" if path.suffix == ".gguf" else "safetensors"), (path,)
    if (path / MANIFEST).is_file():
        return "orbax", ()
    ggufs, safetensors = sorted(path.glob("*.gguf")), sorted(path.glob("*.safetensors"))
    indexed = (path / INDEX).is_file()
    if ggufs and (safetensors or indexed):
        raise CheckpointError(
            f"{path} holds both .gguf and .safetensors weights; name the file to load, for example {ggufs[0]}, or move "
            "one of them away"
        )
    if len(ggufs) > 1:
        listed = ", ".join(file.name for file in ggufs)
        raise CheckpointError(f"{path} holds several .gguf files ({listed}); name the one to load")
    if ggufs:
        return "gguf", tuple(ggufs)
    if safetensors or indexed:
        return "safetensors", tuple(safetensors)
    raise CheckpointError(f"{path} holds no .safetensors, .gguf or converted weights")
