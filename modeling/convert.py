"""python -m modeling.convert SRC DST: a checkpoint as Orbax, which restores onto any number of devices.

Weights keep their on-disk precision and packing. DST also gets the config, the tokenizer's files and a manifest, so
that it can be used wherever SRC could; of a GGUF file it keeps the metadata, where a tokenizer may be.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from modeling.errors import CheckpointError


def convert(source: str | Path, folder: str | Path, *, config: str | Path | None = None, progress: bool = True) -> None:
    """Converts a checkpoint that `modeling.load` can load.

    Args:
        source: as `modeling.load` takes it. folder: where to write; absent or an empty folder.
        config: where a GGUF file's config and tokenizer come from.

    Raises:
        CheckpointError: the source cannot be loaded, is converted already, or `folder` has something in it.
    """
    folder = Path(folder).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder; nothing was written")
    from modeling.loading import orbax
    from modeling.loading.load import fill
    from modeling.loading.plan import make_plan
    from modeling.loading.source import find

    checkpoint = find(source, config)
    if checkpoint.kind == "orbax":
        raise CheckpointError(f"{source} is a converted checkpoint already")
    plan = make_plan(checkpoint, "float32", None)  # float32 compute: no parameter is rounded
    orbax.save(fill(plan, checkpoint.path, progress=progress), plan, checkpoint, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m modeling.convert", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("source", metavar="SRC", help="checkpoint folder, .gguf file, or hub repository id")
    parser.add_argument("folder", metavar="DST", help="folder to write: absent or empty")
    parser.add_argument("--config", help="folder or repository with the config and tokenizer of a .gguf file")
    options = parser.parse_args(arguments)
    try:
        convert(options.source, options.folder, config=options.config)
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # extension modules swallow KeyboardInterrupt while they load
    sys.exit(main())
