"""`python -m serve.grpc`: see `--help`. Imports no JAX before the options are read."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from serve.grpc.config import parse
from serve.grpc.lifecycle import USER_ERROR, Assemble, run


def main(argv: Sequence[str] | None = None, assemble: Assemble | None = None) -> int:
    """Serves until a signal; returns the exit code: 0 after a drain, 2 for what the user can put right.

    Standard output gets one line, when the server is ready. Everything else goes to standard error.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        return asyncio.run(run(config, assemble))
    except (ValueError, OSError) as error:
        logging.getLogger("serve.grpc").debug("What led to the error below", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR


if __name__ == "__main__":
    # Extension modules swallow KeyboardInterrupt while they load; the server installs handlers of its own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
