"""Stopping on request, alike on all ranks: SIGTERM or SIGINT (Ctrl-C), SIGUSR1 (save now), and a time limit.

A rank that is asked tells the others through the store of the process group; each looks there in a thread.
The decision is made by all of them together at the next safe point, :meth:`StopControl.decide`, and work that
may take long looks at :meth:`StopControl.should_interrupt`.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_rl.resilience import signals
from titan_rl.titan.api import logger
from titan_rl.titan.collectives import HostGroup

REPEAT_SECONDS = 2.0
"""A batch system may signal launcher and ranks, and the launcher the ranks again: that is one request."""
ALIVE_SECONDS = 2.0
"""How long the ranks wait for each other's answer before they give up a checkpoint that needs all of them."""
LAUNCHER_SECONDS = 3.0
"""How long a rank that another one has told waits for its own launcher's signal before it ends."""
EXIT_CODE = 128 + signal.SIGTERM
_POLL_SECONDS = 0.25
_KEY = "titan_rl/stop"


class Wish(enum.IntEnum):
    """What is asked of a run; a larger one includes the smaller ones."""

    NOTHING = 0
    SAVE = 1
    TIME_LIMIT = 2
    PREEMPT = 3


class StopControl:
    """What one rank knows about a request to save or to stop.

    Attributes:
        on_forced_end: Called with one line about the cause and the failure that a rank has noted, if any,
            before the process ends without waiting for a safe point.
    """

    def __init__(self, *, grace_seconds: float, stop_after_minutes: float, group: HostGroup) -> None:
        """Begin to listen. The process group is there.

        Args:
            grace_seconds: From SIGTERM or SIGINT until the process ends, saved or not.
            stop_after_minutes: Age of the process at which the run ends; 0: no limit.
            group: Used by this object alone.
        """
        self.on_forced_end: Callable[[str, str | None], None] | None = None
        self._grace, self._group = grace_seconds, group
        limit = 60 * stop_after_minutes
        self._deadline = time.monotonic() + limit - process_age() if limit else float("inf")
        self._saves = False
        self._first_signal: float | None = None
        self._is_preempted = threading.Event()
        self._timer: threading.Timer | None = None
        self._is_closing = threading.Event()
        self._lock = threading.Lock()
        self._store: Any = None
        self._thread: threading.Thread | None = None
        if group.world_size > 1:
            self._store = dist.distributed_c10d._get_default_store().clone()
            self._thread = threading.Thread(target=self._watch, name="stop-control", daemon=True)
            self._thread.start()
        signals.listen(self._on_signal)

    def should_interrupt(self) -> bool:
        """Whether this rank should give up what it is doing and come to the safe point."""
        return self._is_preempted.is_set() or time.monotonic() >= self._deadline

    def decide(self) -> Wish:
        """What all ranks do now, the same on each. Collective."""
        wish, self._saves = Wish.SAVE if self._saves else Wish.NOTHING, False
        if self.should_interrupt():
            wish = Wish.PREEMPT if self._is_preempted.is_set() else Wish.TIME_LIMIT
        return Wish(self._group.maximum(wish))

    def is_stopping_anywhere(self, is_interrupted: bool) -> bool:
        """Whether any rank has given up its work. Collective."""
        return bool(self._group.maximum(int(is_interrupted)))

    def largest(self, value: int) -> int:
        """The largest value of any rank. Collective."""
        return self._group.maximum(value)

    def note_failure(self, cause: str) -> str:
        """Tell the other ranks why this one ends, in case they wait for it.

        Args:
            cause: One line.

        Returns:
            What failed first, on whichever rank: when one ends, the others fail in a collective soon.
        """
        if self._store is None:
            return cause
        mine = f"[rank {self._group.rank}] {cause}"
        try:
            first = self._store.compare_set(f"{_KEY}/failed", "", mine).decode()
        except RuntimeError:  # the store went with the rank or the launcher that held it
            return cause
        return cause if first == mine else first

    def wait_for_launcher(self) -> None:
        """Where only another rank was asked to stop, give this one's launcher time to ask as well.

        When a node comes, each launcher notices by itself and restarts its ranks. One whose rank has ended
        with 0 before that takes the job for done, and its node would be missing from then on.
        """
        deadline = time.monotonic() + LAUNCHER_SECONDS
        while self._is_preempted.is_set() and self._first_signal is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Stop listening. Repeating it changes nothing, whoever listens by then."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._thread.join(4 * _POLL_SECONDS)  # it must not talk to a store that is going away
        signals.stop_listening()

    # ------------------------------------------------------------------------------------- other threads

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR1:
            self._saves = True
            return
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = now
            self._preempt(number.name)
        elif now - self._first_signal > REPEAT_SECONDS:
            self._end(f"asked again, by {number.name}")

    def _preempt(self, source: str) -> None:
        with self._lock:
            if self._is_preempted.is_set():
                return
            self._timer = threading.Timer(self._grace, self._end, [f"{self._grace:g} s of grace are over"])
            self._timer.daemon = True
            self._timer.start()
            self._is_preempted.set()
        logger.warning(
            "Stop requested by %s: saving at the next safe point, then ending; asked again, ending at once.",
            source,
        )

    def _watch(self) -> None:
        """Tell the others, or hear from them; then make sure that all are there to save together."""
        try:
            while not self._is_preempted.wait(_POLL_SECONDS):
                if self._is_closing.is_set():
                    return
                if self._store.check([_KEY]):
                    self._preempt("another rank")
            self._store.set(_KEY, "1")
            self._store.set(f"{_KEY}/alive/{self._group.rank}", "1")
            self._wait_for_all()
        except RuntimeError as error:
            if not self._is_closing.is_set():
                logger.warning("The ranks cannot ask each other to stop any more: %s", error)

    def _wait_for_all(self) -> None:
        keys = [f"{_KEY}/alive/{rank}" for rank in range(self._group.world_size)]
        deadline = time.monotonic() + ALIVE_SECONDS
        while not self._is_closing.is_set() and not self._store.check(keys):
            if time.monotonic() > deadline:
                silent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
                self._end(f"rank {', '.join(silent[:8])} does not answer, and a checkpoint needs all")
            time.sleep(_POLL_SECONDS / 5)

    def _end(self, cause: str) -> None:
        """End this process at once: what was saved stays, what was not is done again."""
        if self._is_closing.is_set():
            return
        print(f"[rank {self._group.rank}] Ending at once: {cause}.", file=sys.stderr, flush=True)
        try:
            if self.on_forced_end is not None:
                self.on_forced_end(cause, self._noted_failure())
        finally:
            os._exit(EXIT_CODE)

    def _noted_failure(self) -> str | None:
        key = f"{_KEY}/failed"
        try:
            return (
                self._store.get(key).decode()
                if self._store is not None and self._store.check([key])
                else None
            )
        except RuntimeError:  # the store went with the rank or the launcher that held it
            return None


def process_age() -> float:
    """Seconds since this process was started."""
    started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - started / os.sysconf("SC_CLK_TCK")
