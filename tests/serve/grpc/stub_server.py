"""`python stub_server.py FOLDER [options of python -m serve.grpc]`: the whole server process, with the stub engine.

FOLDER/engine.json holds the stub's settings; `load_seconds` and `load_error` stand for slow and failing checkpoints.
"""

import json
import sys
import time
from pathlib import Path

from grpc_harness import stub_model

from serve.grpc.__main__ import main


def assemble(model, *, num_slots, max_queue, max_model_len, **_):
    settings = json.loads((Path(model) / "engine.json").read_text())
    time.sleep(settings.pop("load_seconds", 0))
    error = settings.pop("load_error", None)
    if error == "bug":
        raise RuntimeError("a bug")
    if error is not None:
        raise {"ValueError": ValueError, "FileNotFoundError": FileNotFoundError}[error](f"cannot load {model}")
    limit = {} if max_model_len is None else {"max_model_len": max_model_len}
    return stub_model(Path(model), num_slots=num_slots, max_queue=max_queue, **settings, **limit)


if __name__ == "__main__":
    sys.exit(main(["--model", *sys.argv[1:]], assemble))
