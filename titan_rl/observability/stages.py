"""Wall-clock time by stage of an iteration."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager


class StageTimer:
    """Adds up seconds by stage name; stages do not nest.

    >>> timer = StageTimer()
    >>> with timer.stage("train"):
    ...     pass
    >>> list(timer.seconds)
    ['train']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._since = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Count the time of a block towards a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Return the seconds so far and start again at zero."""
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        self._since = time.perf_counter()
        return seconds

    def elapsed(self) -> float:
        """Seconds since :meth:`take`, or since the start: those of all stages, and those between them."""
        return time.perf_counter() - self._since
