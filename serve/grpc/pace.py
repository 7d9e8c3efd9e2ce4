"""How fast the server gets through its requests, and so when one that found the queue full should come again."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator

_RECENT = 32  # requests that the mean is over
_SHORTEST_S, _LONGEST_S = 0.1, 30.0


class Pace:
    """The mean time between two ends of requests, over the last ones; time without any request does not count.

    Args:
        clock: seconds that only rise.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._gaps: collections.deque[float] = collections.deque(maxlen=_RECENT)  # seconds a sequence
        self._num_running = 0
        self._since = 0.0  # the last end, or the start after which there was always something to do

    @contextlib.contextmanager
    def running(self, num_sequences: int) -> Iterator[None]:
        """Around a request that the engine has taken, however it ends: its places are free afterwards."""
        if self._num_running == 0:
            self._since = self._clock()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            now = self._clock()
            self._gaps.append((now - self._since) / num_sequences)
            self._since = now

    def retry_after_s(self, num_waiting: int) -> float:
        """Seconds in which `num_waiting` sequences will be through at the present pace, 0.1 to 30.

        The time since the last end counts where it is longer than the mean: requests have become slower then, or none
        has ended yet.
        """
        mean = sum(self._gaps) / len(self._gaps) if self._gaps else 0.0
        present = self._clock() - self._since if self._num_running else 0.0
        return min(max(max(mean, present) * max(num_waiting, 1), _SHORTEST_S), _LONGEST_S)
