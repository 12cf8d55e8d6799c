"""Wall-clock time by stage of an iteration, and the part of it in which this rank waited for no other."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager

from titan_rl import heartbeat


class StageTimer:
    """Adds up seconds by stage name; stages do not nest. A stage is a phase of :mod:`titan_rl.heartbeat`.

    Attributes:
        seconds: Wall-clock seconds by stage.
        own_seconds: The same without what was waited.

    >>> timer = StageTimer()
    >>> with timer.stage("train"):
    ...     pass
    >>> list(timer.seconds)
    ['train']
    """

    def __init__(self, waited_seconds: Callable[[], float] = lambda: 0.0) -> None:
        """Start at zero.

        Args:
            waited_seconds: Seconds that this process has waited for others so far.
        """
        self.seconds: dict[str, float] = defaultdict(float)
        self.own_seconds: dict[str, float] = defaultdict(float)
        self._waited_seconds = waited_seconds
        self._since = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Count the time of a block towards a stage."""
        started, waited = time.perf_counter(), self._waited_seconds()
        try:
            with heartbeat.phase(name):
                yield
        finally:
            seconds = time.perf_counter() - started
            self.seconds[name] += seconds
            self.own_seconds[name] += seconds - (self._waited_seconds() - waited)

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return ``seconds`` and ``own_seconds`` so far, and start both again at zero."""
        taken = dict(self.seconds), dict(self.own_seconds)
        self.seconds, self.own_seconds = defaultdict(float), defaultdict(float)
        self._since = time.perf_counter()
        return taken

    def elapsed(self) -> float:
        """Seconds since :meth:`take`, or since the start: those of all stages, and those between them."""
        return time.perf_counter() - self._since
