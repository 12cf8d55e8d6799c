"""Planted faults: named points of a step at which a run kills, stops, fails, slows or poisons itself.

They prove that a run recovers, on the machine and at the size that matter. Off unless ``TITAN_RL_FAULT`` is
set: a point then costs one look at an empty tuple. Standard library only.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.errors import ConfigError

VARIABLE = "TITAN_RL_FAULT"
FOLDER = "faults"
SLOW_SECONDS = 5.0

POINTS = (
    *("data.next", "rollout.begin", "rollout.mid", "rollout.end", "reward.begin", "reward.mid"),
    *("old_logprobs", "ref_logprobs", "advantage"),
    *("forward_backward.<i>", "optimizer.before", "optimizer.after"),
    *("sync.begin", "sync.bucket.<i>", "sync.end"),
    *("checkpoint.stage", "checkpoint.shard", "checkpoint.before_commit", "checkpoint.after_commit"),
    *("checkpoint.purge", "evaluation", "shutdown"),
)
"""In the order in which an iteration comes to them; ``<i>`` counts from 0."""

WITH_VALUES = ("old_logprobs", "ref_logprobs", "advantage", "forward_backward.<i>", "optimizer.before")
"""Where there are numbers that ``nan`` can replace; at ``optimizer.before`` they are the gradients."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of ``TITAN_RL_FAULT``.

    Attributes:
        point: One of ``POINTS``, with a number for ``<i>``.
        step: Optimiser step that is being made, in an iteration of several the first; at ``checkpoint.*``
            that of the checkpoint; 0: before the first iteration of a start, when it loads, pushes its
            weights, and may evaluate.
        rank: Which rank does it.
        attempt: Restarts by torchrun before this start: 0 for the first.
        mode: A key of ``MODES``, or ``slow=SECONDS``.
    """

    point: str
    step: int
    rank: int
    attempt: int
    mode: str

    def __str__(self) -> str:
        return ":".join(str(value) for value in dataclasses.astuple(self))


_planted: tuple[Fault, ...] = ()  # this process's; all of it belongs to the process, as the faults do
_folder = Path()
_step = 0


def parse(text: str) -> tuple[Fault, ...]:
    """Read ``point:step:rank:attempt:mode[;...]``.

    Raises:
        ConfigError: an entry has another form, or names a point or mode that there is not.

    >>> [str(fault) for fault in parse("optimizer.before:3:1:0:sigkill")]
    ['optimizer.before:3:1:0:sigkill']
    """
    return tuple(_parse_entry(entry.strip()) for entry in text.split(";") if entry.strip())


def arm(folder: Path) -> None:
    """Read ``TITAN_RL_FAULT``, and keep what is meant for this rank and this attempt.

    Args:
        folder: The run's ``dump_folder``; witnesses go to ``faults`` in it.

    Raises:
        ConfigError: see :func:`parse`.
    """
    global _planted, _folder, _step
    rank = int(os.environ.get("RANK", "0"))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    faults = parse(os.environ.get(VARIABLE, ""))
    _planted = tuple(fault for fault in faults if (fault.rank, fault.attempt) == (rank, attempt))
    _folder, _step = folder / FOLDER, 0


def begin_step(step: int) -> None:
    """Say which optimiser step the following points belong to."""
    global _step
    _step = step


def at(point: str, number: int | None = None, *, step: int | None = None, values: Iterable[Any] = ()) -> None:
    """Do what is planted here, if anything is.

    Args:
        point: One of ``POINTS``, without ``.<i>``.
        number: What stands for ``<i>``.
        step: Where it is not that of :func:`begin_step`: a checkpoint may be written during later steps.
        values: Tensors that ``nan`` overwrites in place, parameters with a gradient in that; only looked at
            for it.
    """
    if _planted:
        name = point if number is None else f"{point}.{number}"
        for fault in _planted:
            if (fault.point, fault.step) == (name, _step if step is None else step) and _leave_witness(fault):
                _act(fault, values)


def witnesses(folder: Path) -> dict[Fault, float]:
    """The faults that have happened, with the time of each in seconds since the epoch.

    Args:
        folder: The run's ``dump_folder``.
    """
    found = {}
    for path in (folder / FOLDER).glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        found[Fault(**content["fault"])] = content["time"]
    return found


def _leave_witness(fault: Fault) -> bool:
    """Write down that it happens now; False if it has happened before."""
    _folder.mkdir(parents=True, exist_ok=True)
    content = {"fault": dataclasses.asdict(fault), "time": time.time(), "pid": os.getpid()}
    path = _folder / f"{str(fault).replace(':', '-')}.json"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(content) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    return True


def _act(fault: Fault, values: Iterable[Any]) -> None:
    what = f"planted {fault.mode} at {fault.point}, step {fault.step}, attempt {fault.attempt}"
    print(f"[rank {fault.rank}] Fault: {what}.", file=sys.stderr, flush=True)
    mode, _, argument = fault.mode.partition("=")
    MODES[mode](what, values, argument)


def _raise(what: str, *_: Any) -> None:
    raise RuntimeError(what)


def _raise_enospc(what: str, *_: Any) -> None:
    raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({what})")


def _overwrite(_what: str, values: Iterable[Any], _argument: str) -> None:
    for value in values:
        if value.is_leaf and value.grad is not None:
            value = value.grad
        shard = value.to_local() if hasattr(value, "to_local") else value
        shard.data.fill_(math.nan)  # .data: autograd may have seen it already


MODES: dict[str, Callable[[str, Iterable[Any], str], None]] = {
    "sigkill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "sigstop": lambda *_: os.kill(os.getpid(), signal.SIGSTOP),
    "exit1": lambda *_: os._exit(1),
    "raise": _raise,
    "enospc": _raise_enospc,
    "slow": lambda _what, _values, seconds: time.sleep(float(seconds or SLOW_SECONDS)),
    "nan": _overwrite,
}
"""What happens: signals to the process itself, an exit without cleaning up, an exception, ENOSPC (at
``checkpoint.*``), a wait, or NaN in place of the values (at ``WITH_VALUES``)."""


def _parse_entry(entry: str) -> Fault:
    parts = entry.split(":")
    if len(parts) != 5 or not all(part.isdigit() for part in parts[1:4]):
        raise _malformed(
            'be entries "point:step:rank:attempt:mode" with ";" between them',
            entry,
            "An example: optimizer.before:3:1:0:sigkill.",
        )
    fault = Fault(parts[0], int(parts[1]), int(parts[2]), int(parts[3]), parts[4])
    kind = ".".join("<i>" if part.isdigit() else part for part in fault.point.split("."))
    if kind not in POINTS:
        raise _malformed("name a point that there is", fault.point, f"Points: {', '.join(POINTS)}.")
    mode, has_argument, argument = fault.mode.partition("=")
    if mode not in MODES or (has_argument and not (mode == "slow" and _is_seconds(argument))):
        raise _malformed(
            "name a mode that there is",
            fault.mode,
            f"Modes: {', '.join(MODES)}; slow=SECONDS for another wait.",
        )
    if mode == "nan" and kind not in WITH_VALUES:
        raise _malformed("plant nan where there are numbers", entry, f"Choose {', '.join(WITH_VALUES)}.")
    if mode == "enospc" and not kind.startswith("checkpoint."):
        raise _malformed("plant enospc where something is written", entry, "Choose a point checkpoint.*.")
    return fault


def _is_seconds(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _malformed(constraint: str, got: str, remedy: str) -> ConfigError:
    return ConfigError(VARIABLE, constraint, got, remedy)
