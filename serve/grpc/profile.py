"""JAX profiles of the running server, one at a time.

JAX records into a folder of this module's own, and the result is copied to the one asked for. JAX keeps a profile that
it cannot write, and starts no other until it could: a folder that has become unusable must not lead to that.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

import grpc

from serve.grpc.errors import Refusal
from serve.request import InvalidRequest


class Profiler:
    """Starts and stops profiles. Both methods take a while and belong in a thread; a second call meanwhile is refused.

    Raises:
        Refusal: FAILED_PRECONDITION if the call does not fit the state; INTERNAL if JAX fails.
        InvalidRequest: the folder cannot be used.
    """

    def __init__(self):
        self._busy = threading.Lock()
        self._recording: Path | None = None  # JAX's folder, while a profile runs
        self._wanted: Path | None = None  # where the client wants it

    def start(self, output_dir: str) -> Path:
        """Begins a profile; where it will be. An empty `output_dir` is a new temporary folder."""
        with _Turn(self._busy):
            if self._recording is not None:
                message = f"A profile is running, to {self._wanted or self._recording}; call StopProfile first."
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, message)
            wanted = _usable(Path(output_dir)) if output_dir else None
            try:
                folder = Path(tempfile.mkdtemp(prefix="firesteel-profile-"))
            except OSError as error:
                raise _failed("No temporary folder for the profile can be made", error) from error
            import jax

            try:
                jax.profiler.start_trace(str(folder))
            except Exception as error:
                shutil.rmtree(folder, ignore_errors=True)
                raise _failed("JAX cannot start a profile", error) from error
            self._recording, self._wanted = folder, wanted
            return wanted or folder

    def stop(self) -> Path | None:
        """Ends the profile; where it is, or None if none was running."""
        with _Turn(self._busy):
            folder, wanted = self._recording, self._wanted
            if folder is None:
                return None
            import jax

            try:
                folder.mkdir(parents=True, exist_ok=True)
                jax.profiler.stop_trace()
            except Exception as error:  # JAX still has the profile
                raise _failed(f"The profile cannot be written to {folder}; call StopProfile again", error) from error
            self._recording = self._wanted = None
            if wanted is None:
                return folder
            try:
                shutil.copytree(folder, wanted, dirs_exist_ok=True)
            except OSError as error:
                raise _failed(f"The profile is in {folder}; it cannot be copied to {wanted}", error) from error
            shutil.rmtree(folder, ignore_errors=True)
            return wanted


class _Turn:
    """Takes the lock, or refuses at once."""

    def __init__(self, lock: threading.Lock):
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            message = "Another StartProfile or StopProfile is at work; call again when it has answered."
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, message)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _usable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"profile")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise InvalidRequest(f"output_dir {str(folder)!r} cannot be written to: {error}") from error
    return folder


def _failed(what: str, error: Exception) -> Refusal:
    return Refusal(grpc.StatusCode.INTERNAL, f"{what}: {error}")
