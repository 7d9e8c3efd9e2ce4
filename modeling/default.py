"""The checkpoint that every command takes when none is named."""

from pathlib import Path

DEFAULT_CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "flint-tiny"
