"""Ending a worker together with every process that it started.

A reward may run programs that start programs of their own, leave the process group, and outlive their
parent. Three nets catch them: the process group, the tree of parents in ``/proc`` (a worker is a sub-reaper,
so orphans stay below it), and a marker in the environment, which also finds what a crashed worker left.
Linux only.
"""

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path

MARKER_VARIABLE = "TITAN_RL_REWARD_WORKER"
"""Environment variable that every process below a worker inherits."""

_PROC = Path("/proc")
_MAX_ROUNDS = 200
_ROUND_SECONDS = 0.005


def new_marker() -> str:
    """Return a value for :data:`MARKER_VARIABLE` that no other worker has."""
    return secrets.token_hex(16)


def kill_tree(pid: int, *, marker: str) -> None:
    """Kill a worker, its process group, its descendants, and whatever carries its marker.

    Args:
        pid: The worker: a child of this process, leader of its process group, not yet waited for (so that its
            number cannot have been given to another process). It may have exited already.
        marker: The worker's value of :data:`MARKER_VARIABLE`.
    """
    # A stopped worker starts no more children, but stays the parent that orphans fall back to.
    _signal(pid, signal.SIGSTOP)
    for _ in range(_MAX_ROUNDS):
        alive = (_live_descendants(pid) | _live_carriers(marker)) - {pid}
        if not alive:
            break
        for descendant in alive:
            _signal(descendant, signal.SIGKILL)
        time.sleep(_ROUND_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    # It may have ended by itself, or become another user's.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _live_descendants(root: int) -> set[int]:
    """Return the processes below ``root`` that are not zombies."""
    children: dict[int, list[int]] = {}
    live = set()
    for pid in _all_pids():
        try:
            # The name in parentheses may hold spaces and parentheses itself; state and parent follow it.
            state, parent = (
                (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            )
        except OSError:
            continue  # it ended while we looked
        children.setdefault(int(parent), []).append(pid)
        if state not in ("Z", "X"):
            live.add(pid)
    found, frontier = set(), [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found.update(below)
        frontier.extend(below)
    return found & live


def _live_carriers(marker: str) -> set[int]:
    """Return the processes whose environment at their start held the marker. Zombies have none."""
    entry = f"{MARKER_VARIABLE}={marker}".encode()
    found = set()
    for pid in _all_pids():
        try:
            if entry in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                found.add(pid)
        except OSError:
            continue  # it ended, or belongs to another user
    return found


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdecimal()]
