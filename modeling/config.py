"""Which architecture a checkpoint folder holds, from its `config.json` alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modeling.errors import CheckpointError

if TYPE_CHECKING:
    from modeling.architecture import Config


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: the file is absent, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: a checkpoint folder needs it") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): the file may be truncated") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def load_config(folder: Path) -> Config:
    """Reads `folder/config.json`.

    Raises:
        CheckpointError: no such file, an unknown `model_type`, or a config that contradicts itself.
    """
    from modeling.architecture import ARCHITECTURES  # brings in JAX, which reading JSON alone does not need

    raw = read_json(Path(folder) / "config.json")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"{folder}/config.json has model_type {model_type!r}; this engine runs {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[model_type].config.from_json(raw)
