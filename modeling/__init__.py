"""What the models compute, Flint and Inkling, and loading them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modeling.errors import CheckpointError as CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from jax.sharding import Mesh

    from modeling.architecture import Model


def load(
    path: str | Path,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    text_only: bool = False,
    router_dtype: str | None = None,
    progress: bool = True,
    config: str | Path | None = None,
) -> Model:
    """Loads a checkpoint into a model, ready to run.

    Everything the files' headers can tell is checked first, and all faults are reported in one message before any
    tensor is read or device memory allocated. Bytes that only reading can judge (NVFP4 block scales) are checked on
    the way. Reading needs little host memory beside the model: on the CPU the model is the buffers it was read into.

    Args:
        path: a folder of safetensors, of one GGUF file, or made by `python -m modeling.convert`; a .gguf or
            .safetensors file; or a hub repository id, `org/name` or `org/name@revision`, fetched when nothing of that
            name is on disk.
        dtype: compute dtype, float32 or bfloat16; None takes the config's, else bfloat16. Parameters keep their
            on-disk precision, but for float32 matrices, which are rounded for bfloat16 compute.
        mesh: devices to spread the model over by `sharding.rules`; None uses the default device.
        text_only: leave out vision and audio towers; Flint has none.
        router_dtype: "float32" or "bfloat16" (see `modeling.layers.moe.SparseMLP`); None takes the routers' dtype on
            disk. "bfloat16" rounds float32 routers, with a warning; Inkling's routers compute in float32 only.
        progress: show a bar on stderr.
        config: folder, `config.json` or repository id to read the config from; a GGUF file alone needs it.

    Raises:
        CheckpointError: the checkpoint is absent, damaged, incomplete, or of an unsupported kind.
        ValueError: the model does not divide over the mesh.
    """
    from modeling.loading.load import load as load_checkpoint

    return load_checkpoint(
        path,
        dtype=dtype,
        mesh=mesh,
        text_only=text_only,
        router_dtype=router_dtype,
        progress=progress,
        config=config,
    )
