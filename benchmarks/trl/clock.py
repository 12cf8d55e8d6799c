"""One line of JSON per optimiser step, written when it ends. Every side of the comparison writes the same."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil


class StepClock:
    """Measures from the end of one step to the end of the next: nothing of a loop is left out.

    The first step also holds what happens once, and is not counted by what reads the file.
    """

    def __init__(self, path: Path) -> None:
        """Start.

        Args:
            path: Where the lines go; replaced.
        """
        self._file = path.open("w", encoding="utf-8")
        self._process = psutil.Process()
        self._mark()

    def tick(self, **facts: Any) -> None:
        """End a step.

        Args:
            facts: ``samples``, ``prompt_tokens``, ``completion_tokens``, ``reward`` (their mean) and what
                else a side knows of the step.
        """
        wall, cpu = self._wall, self._cpu
        self._mark()
        record = {"seconds": self._wall - wall, "cpu_seconds": self._cpu - cpu} | facts
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _mark(self) -> None:
        self._wall, self._cpu = time.perf_counter(), self._cpu_seconds()

    def _cpu_seconds(self) -> float:
        """CPU time of this process and of the children that it has now, such as reward workers."""
        times = os.times()
        total = times.user + times.system
        for child in self._process.children(recursive=True):
            try:
                used = child.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += used.user + used.system
        return total
