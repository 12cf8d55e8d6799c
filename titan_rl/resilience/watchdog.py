"""The watchdog of a rank, as the rank sees it: deadlines, and the process that keeps them.

A thread could not: a deadlocked interpreter runs none, and a stopped process none either. So each rank starts
a small process (:mod:`titan_rl.resilience.watcher`) that reads its signs of life
(:mod:`titan_rl.heartbeat`) and ends it when none has come for too long.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from titan_rl import heartbeat

FOLDER = "watchdog"
"""Below ``dump_folder``: one directory for each time that a deadline passed."""

_ROOT = Path(__file__).parents[2]
_COMMAND = "import sys; sys.path.insert(0, {!r}); from titan_rl.resilience import watcher; watcher.main()"
_KEYS = {
    "start": "start_seconds",
    "data": "data_seconds",
    "reference": "train_seconds",
    "generate": "generate_seconds",
    "reward": "reward_seconds",
    "score": "train_seconds",
    "train": "train_seconds",
    "sync": "sync_seconds",
    "evaluate": "train_seconds",
    "checkpoint": "checkpoint_seconds",
    "collective": "collective_seconds",
    "end": "collective_seconds",
}


@dataclass(kw_only=True, slots=True)
class WatchdogSection:
    """Table ``[resilience.watchdog]``: seconds without progress until all ranks are ended; 0: no deadline.

    A rank makes progress with each generated token, reward, micro-batch, checkpoint and phase.
    """

    start_seconds: Annotated[float, Ge(0)] = 3600.0
    """From the start of the process until the first step: building, loading, compiling, opening data."""

    data_seconds: Annotated[float, Ge(0)] = 1800.0
    """The next rows of a supervised run."""

    generate_seconds: Annotated[float, Ge(0)] = 1800.0
    """The next token of any completion."""

    reward_seconds: Annotated[float, Ge(0)] = 1800.0
    """The next reward."""

    train_seconds: Annotated[float, Ge(0)] = 1800.0
    """The next micro-batch that is trained on or scored, with its collectives, and the optimiser's step."""

    sync_seconds: Annotated[float, Ge(0)] = 1800.0
    """A push of the weights to the generator, with the handshake."""

    checkpoint_seconds: Annotated[float, Ge(0)] = 3600.0
    """Writing a checkpoint or the export, or waiting for one that is written in the background."""

    collective_seconds: Annotated[float, Ge(0)] = 7200.0
    """Anything else, which is where a rank waits for the others: in RL until the slowest has its rollouts, so
    more than twice ``sampling.timeout_seconds``."""

    def by_phase(self) -> dict[str, tuple[str, float]]:
        """Name and seconds of the deadline of each phase."""
        return {phase: (key, getattr(self, key)) for phase, key in _KEYS.items()}


class Watchdog:
    """The process that watches this one, from :meth:`start` to :meth:`close`."""

    def __init__(self, section: WatchdogSection | None) -> None:
        """Nothing is started yet.

        Args:
            section: ``[resilience.watchdog]``; None: nothing ever is.
        """
        self._section = section
        self._child: subprocess.Popen[bytes] | None = None
        self._descriptors: list[int] = []

    def start(self, dump_folder: Path, *, rank: int, world_size: int, writes_status: bool) -> None:
        """Begin to watch: from now on SIGUSR2 dumps the stacks of this process.

        Args:
            dump_folder: The run's, where the watchers of all ranks meet.
            rank: Global rank of this process.
            world_size: Number of ranks.
            writes_status: Whether ``status.json`` is this start's own.
        """
        if self._section is None:
            return
        signs, stacks = heartbeat.memory("titan_rl-signs"), heartbeat.memory("titan_rl-stacks")
        self._descriptors = [signs, stacks]
        os.ftruncate(stacks, 0)
        heartbeat.show_on(heartbeat.Board(signs))
        # Written by a handler that needs no interpreter: a deadlock in it is seen too.
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True, chain=False)
        settings = {
            "pid": os.getpid(),
            "rank": rank,
            "world_size": world_size,
            "signs": signs,
            "stacks": stacks,
            "dump_folder": str(dump_folder.absolute()),
            "folder": str(dump_folder.absolute() / FOLDER),
            "start": _name_of_start(os.environ),
            "deadlines": self._section.by_phase(),
            "writes_status": writes_status,
        }
        # Isolated and without site-packages: it starts in some 20 ms and imports nothing that could hang.
        command = [sys.executable, "-I", "-S", "-c", _COMMAND.format(str(_ROOT)), json.dumps(settings)]
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=self._descriptors)

    def close(self) -> None:
        """Stop watching."""
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        self._child = None
        heartbeat.show_on(None)
        faulthandler.unregister(signal.SIGUSR2)
        for descriptor in self._descriptors:
            os.close(descriptor)


def _name_of_start(environment: Mapping[str, str]) -> str:
    """The same on all ranks of one start, another one when torchrun starts them again."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    text = "/".join(environment.get(name, "") for name in names)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
