"""The process that watches one rank from outside. Standard library only; started by ``resilience.watchdog``.

It compares the age of the rank's last sign of life with the deadline of its phase. When that is over, all
watchers of the run meet in a directory below ``dump_folder``: each has its rank dump its stacks, stops it and
says where it is, one says in a line who waited for what, and each ends its rank with SIGKILL, which also ends
one that is stopped. What starts ranks again when one ends (torchrun ``--max-restarts``) then does.

A watcher ends when its rank does, however that ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from titan_rl.heartbeat import Board, Sign
from titan_rl.resilience.status import write_status

POLL_SECONDS = 0.5
_MEETING_EVERY = 4  # polls: thousands of ranks look at one directory of a shared file system
LINE = "line.txt"
_LONGEST_GAP = 5.0
_STACK_SECONDS = 1.0
_LOOK_SECONDS = 0.5
_BUSY_SHARE = 0.1
_REPORT_SECONDS = 4.0
_TICK = 0.05
_MOST_NAMED = 16
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk or a device", "Z": "dead"}


class Watcher:
    """Watches one rank."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Bind the rank.

        Args:
            settings: From :meth:`titan_rl.resilience.watchdog.Watchdog.start`.
        """
        self._pid, self._rank, self._world_size = settings["pid"], settings["rank"], settings["world_size"]
        self._board, self._stacks = Board(settings["signs"]), settings["stacks"]
        self._deadlines: dict[str, tuple[str, float]] = settings["deadlines"]
        self._dump_folder, self._writes_status = Path(settings["dump_folder"]), settings["writes_status"]
        self._meeting = _next_meeting(Path(settings["folder"]), settings["start"])
        self._number, self._idle, self._looked = 0, 0.0, time.monotonic()

    def run(self) -> None:
        """Watch until the rank has ended, or end it."""
        for number in itertools.count():
            if os.getppid() != self._pid:
                return
            sign = self._board.read()
            key, limit = self._deadlines[sign.phase]
            is_late = self._idle_seconds(sign) > limit > 0
            if is_late or (number % _MEETING_EVERY == 0 and _exists(self._meeting)):
                try:
                    self._meet(sign, f"resilience.watchdog.{key} = {limit:g}" if is_late else None)
                finally:  # whatever keeps this process from saying why
                    self._signal_rank(signal.SIGKILL)
                return
            time.sleep(POLL_SECONDS)

    def _idle_seconds(self, sign: Sign) -> float:
        """Seconds since a sign of life, without those in which this process did not run either."""
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if sign.number != self._number:
            self._number, self._idle = sign.number, min(now - sign.time, _LONGEST_GAP)
        else:  # a machine that was suspended, or a job that was, is not late
            self._idle += min(gap, _LONGEST_GAP)
        return self._idle

    def _meet(self, sign: Sign, deadline: str | None) -> None:
        """Say where the rank is, when the others do."""
        try:
            self._meeting.mkdir(parents=True)
            is_first = True
        except OSError:  # another rank's watcher was first, or there is no folder: then each is alone
            is_first = not _exists(self._meeting)
        report = self._report(sign)
        if is_first:
            reports = self._wait_for_reports({self._rank: report})
            line = describe(self._rank, deadline, reports, world_size=self._world_size)
            _say(line + "\n")
            _write(self._meeting / LINE, line + "\n")
            if self._writes_status:
                self._note(line, saved=sign.saved)
        else:
            _wait(lambda: _exists(self._meeting / LINE), seconds=2 * _REPORT_SECONDS)

    def _signal_rank(self, number: signal.Signals) -> None:
        if os.getppid() == self._pid:
            os.kill(self._pid, number)

    def _report(self, sign: Sign) -> dict[str, Any]:
        """Where the rank is, with its stacks in the log, for the other watchers too."""
        state, busy = process_state(self._pid), _cpu_seconds(self._pid)
        began = time.monotonic()
        stack = "" if state != "running" else self._dump_stacks()
        if state == "running":
            time.sleep(max(began + _LOOK_SECONDS - time.monotonic(), 0.0))
            # On a crowded machine a loop gets a part of a core; a wait takes next to nothing.
            share = (_cpu_seconds(self._pid) - busy) / (time.monotonic() - began)
            state = "running" if share > _BUSY_SHARE else "waiting"
        where = f"rank {self._rank} (process {self._pid}, {state}), in {sign.phase} of step {sign.step}"
        stack = stack or f"  none: a process that is {state} cannot print it.\n"
        _say(f"Watchdog: stacks of {where}:\n{stack}")
        # Stopped before any other ends: one that saw a peer die would write another cause to status.json.
        self._signal_rank(signal.SIGSTOP)
        report = {"phase": sign.phase, "step": sign.step, "state": state, "idle": round(self._idle, 1)}
        _write(self._meeting / f"rank-{self._rank}.json", json.dumps(report | {"stack": stack}, indent=2))
        return report

    def _dump_stacks(self) -> str:
        """Have the rank print the stacks of all its threads; empty if it did not."""
        os.kill(self._pid, signal.SIGUSR2)
        before = -1
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_TICK)
            size = os.fstat(self._stacks).st_size
            if size > 0 and size == before:
                break
            before = size
        return os.pread(self._stacks, 100_000, 0).decode(errors="replace")

    def _wait_for_reports(self, reports: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Those of all ranks that answer in time."""

        def collect() -> bool:
            # A shared file system may show a file a little before its contents.
            with contextlib.suppress(OSError, ValueError):
                for path in self._meeting.glob("rank-*.json"):
                    rank = int(path.stem.removeprefix("rank-"))
                    if rank not in reports:
                        reports[rank] = json.loads(path.read_text(encoding="utf-8"))
            return len(reports) == self._world_size

        _wait(collect, seconds=_REPORT_SECONDS)
        return reports

    def _note(self, line: str, *, saved: int) -> None:
        try:
            write_status(self._dump_folder, "failed", step=saved, cause=line, requeue=True)
        except OSError as error:
            _say(f"Watchdog: status.json could not be written: {error}.\n")


def describe(first: int, deadline: str | None, reports: dict[int, dict[str, Any]], *, world_size: int) -> str:
    """One line: who waited for what.

    Args:
        first: Rank whose deadline was over.
        deadline: Its key and value.
        reports: By rank: ``phase``, ``step``, ``state`` and ``idle`` seconds.
        world_size: Number of ranks.

    >>> stuck = {"phase": "generate", "step": 3, "state": "stopped", "idle": 6.0}
    >>> print(describe(1, "generate_seconds = 5", {1: stuck}, world_size=1))
    Watchdog: rank 1 made no progress for 6 s in generate of step 3 (stopped), longer than \
generate_seconds = 5. All ranks end now.
    """
    mine = reports[first]
    others = [rank for rank in sorted(reports) if rank != first]
    parts = [
        f"Watchdog: rank {first} made no progress for {mine['idle']:.0f} s in {_place(mine)}, longer than "
        f"{deadline or 'its deadline'}"
    ]
    for rank in others[:_MOST_NAMED]:
        parts.append(f"rank {rank} for {reports[rank]['idle']:.0f} s in {_place(reports[rank])}")
    if others[_MOST_NAMED:]:
        parts.append(f"{len(others) - _MOST_NAMED} more ranks are in the log")
    text = "; ".join(parts) + "."
    if world_size > 1:
        found = suspects(reports, world_size=world_size)
        waited_for = ", ".join(map(str, found[:_MOST_NAMED])) if found else "no rank in particular"
        text += f" Waited for: {'rank ' if found else ''}{waited_for}."
    return text + " All ranks end now."


def suspects(reports: dict[int, dict[str, Any]], *, world_size: int) -> list[int]:
    """Ranks that the others seem to have waited for; none when all look alike.

    Those that do not answer or are stopped; else those at an earlier step; else those that are not where the
    ranks agree while others are; else those that compute while others wait.

    Args:
        reports: As for :func:`describe`.
        world_size: Number of ranks.

    >>> at = {"phase": "train", "step": 3, "state": "waiting", "idle": 6.0}
    >>> suspects({0: at, 1: at | {"state": "running"}}, world_size=2)
    [1]
    """
    gone = [r for r in range(world_size) if r not in reports or reports[r]["state"] in _STATES.values()]
    if gone:
        return gone
    last = max(report["step"] for report in reports.values())
    for is_behind in (
        lambda report: report["step"] < last,
        lambda report: report["phase"] != "collective",
        lambda report: report["state"] == "running",
    ):
        behind = [rank for rank in sorted(reports) if is_behind(reports[rank])]
        if behind and len(behind) < len(reports):
            return behind
    return []


def process_state(pid: int) -> str:
    """``running`` (or ready to), or what keeps a process from it.

    Args:
        pid: The process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "gone"
    return _STATES.get(stat.rpartition(")")[2].split()[0], "running")


def _place(report: dict[str, Any]) -> str:
    return f"{report['phase']} of step {report['step']} ({report['state']})"


def _cpu_seconds(pid: int) -> float:
    """Of the main thread."""
    try:
        stat = Path(f"/proc/{pid}/task/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _next_meeting(folder: Path, start: str) -> Path:
    """The first directory of this start that no earlier one of the same name has used."""
    number = 1
    while _exists(folder / f"{start}-{number}"):
        number += 1
    return folder / f"{start}-{number}"


def _exists(path: Path) -> bool:
    """As :meth:`Path.exists`; False too while the file system cannot say, which must not end the watch."""
    try:
        return path.exists()
    except OSError:
        return False


def _wait(condition: Any, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(_TICK)


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(f".partial-{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        _say(f"Watchdog: {path} could not be written: {error}.\n")


def _say(text: str) -> None:
    """In one piece, so that ranks do not write into each other's lines."""
    os.write(2, text.encode())


def main() -> None:
    """Watch the rank that the first argument describes."""
    for number in _IGNORED:  # a batch system signals everybody; the rank is to be watched while it saves
        signal.signal(number, signal.SIG_IGN)
    Watcher(json.loads(sys.argv[1])).run()
