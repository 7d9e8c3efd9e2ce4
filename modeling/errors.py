"""The one exception users meet when a checkpoint or its config cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint or its config is unusable as it stands. The message names every fault found and what to change."""
