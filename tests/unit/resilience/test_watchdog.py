"""The process that watches, with small processes in the place of ranks: no torch."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titan_rl import heartbeat
from titan_rl.resilience import watchdog, watcher

ROOT = Path(watchdog.__file__).parents[2]
RANK = """
import ctypes, signal, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from titan_rl import heartbeat
from titan_rl.resilience.watchdog import Watchdog, WatchdogSection
section = WatchdogSection(**{deadlines!r})
watching = Watchdog(section)
watching.start(Path({folder!r}), rank={rank}, world_size={world_size}, writes_status=True)
heartbeat.enter("train", step=3, saved=2)
print("ready", flush=True)
{body}
"""
DEADLOCK = """
mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)  # which keeps the interpreter's lock
library.pthread_mutex_lock(mutex)
library.pthread_mutex_lock(mutex)
"""


def start(folder: Path, body: str, *, rank: int = 0, world_size: int = 1, **deadlines: float):
    all_deadlines = {"start_seconds": 60, "train_seconds": 1} | deadlines
    source = RANK.format(
        root=str(ROOT),
        folder=str(folder),
        rank=rank,
        world_size=world_size,
        body=body,
        deadlines=all_deadlines,
    )
    command = [sys.executable, "-c", source]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def watchers_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(path.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_deadlocked_interpreter_is_found_from_outside(tmp_path: Path) -> None:
    process = start(tmp_path, DEADLOCK)
    _, log = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert "in train of step 3 (waiting), longer than resilience.watchdog.train_seconds = 1." in log
    assert 'File "<string>"' in log  # the stack, printed without the interpreter
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["outcome"], status["step"], status["requeue"]) == ("failed", 2, True)
    assert status["cause"].startswith("Watchdog: rank 0 made no progress")


def test_a_stopped_process_is_named_as_such_and_ended(tmp_path: Path) -> None:
    process = start(tmp_path, "import os; os.kill(os.getpid(), signal.SIGSTOP)")
    _, log = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert "in train of step 3 (stopped)" in log
    assert "none: a process that is stopped cannot print it" in log


def test_signs_of_life_and_a_deadline_of_nought_keep_a_rank_alive(tmp_path: Path) -> None:
    beating = start(tmp_path / "a", "for _ in range(15): heartbeat.beat(); time.sleep(0.2)")
    unbounded = start(tmp_path / "b", 'heartbeat.enter("sync"); time.sleep(3)', sync_seconds=0)
    for process in (beating, unbounded):
        _, log = process.communicate(timeout=30)
        assert (process.returncode, log) == (0, "")
    assert not (tmp_path / "a").exists()  # nothing is left behind where nothing happened


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_a_watcher_never_outlives_its_rank(end: signal.Signals | None, tmp_path: Path) -> None:
    process = start(tmp_path, "time.sleep(0.5)" if end is None else "time.sleep(600)", train_seconds=0)
    (child,) = watchers_of(process.pid)
    if end is not None:
        process.send_signal(end)
    process.wait(timeout=30)
    deadline = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def test_all_ranks_end_with_the_one_that_hangs(tmp_path: Path) -> None:
    well = "while True: heartbeat.beat(); time.sleep(0.1)"
    processes = [
        start(tmp_path, body, rank=rank, world_size=2) for rank, body in enumerate((well, "time.sleep(600)"))
    ]
    logs = [process.communicate(timeout=30)[1] for process in processes]
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
    assert "Watchdog: rank 1 made no progress" in logs[1]
    assert "Watchdog: rank 1 made no progress" not in logs[0]  # one line in all
    assert "Watchdog: stacks of rank 0" in logs[0]
    assert "Watchdog: stacks of rank 1" in logs[1]


def test_a_rank_whose_folder_cannot_be_written_is_ended_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = start(tmp_path / "file", "time.sleep(600)", world_size=2)
    _, log = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert "Waited for: rank 1." in log  # which did not come


def test_a_rank_whose_log_nobody_reads_any_more_is_ended_all_the_same(tmp_path: Path) -> None:
    process = start(tmp_path, "time.sleep(600)")
    assert process.stderr is not None
    process.stderr.close()  # so that the watcher cannot print
    assert process.wait(timeout=30) == -signal.SIGKILL


def test_a_file_system_that_fails_for_a_moment_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: its parent stands for the rank, and is sent nothing."""
    sent: list[int] = []

    def stale(path: Path) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(Path, "exists", stale)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(watcher, "POLL_SECONDS", 0.01)
    settings = {
        "pid": os.getppid(),
        "rank": 0,
        "world_size": 1,
        "signs": heartbeat.memory("signs"),
        "stacks": heartbeat.memory("stacks"),
        "dump_folder": str(tmp_path),
        "folder": str(tmp_path / "watchdog"),
        "start": "start",
        "deadlines": {"start": ("start_seconds", 0.05)},
        "writes_status": False,
    }
    watcher.Watcher(settings).run()
    assert sent[-1] == signal.SIGKILL


def test_close_stops_watching(tmp_path: Path) -> None:
    body = "watching.close(); time.sleep(3)"
    process = start(tmp_path, body)
    _, log = process.communicate(timeout=30)
    assert (process.returncode, log) == (0, "")


def test_every_phase_has_a_deadline() -> None:
    assert set(watchdog.WatchdogSection().by_phase()) == set(heartbeat.PHASES)


AT = {"phase": "train", "step": 3, "state": "waiting", "idle": 6.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{}, {}], []),
        ([{}, {"state": "stopped"}], [1]),
        ([{}, {"step": 2}], [1]),
        ([{"phase": "collective"}, {}], [1]),
        ([{"state": "running"}, {}], [0]),
        ([{"phase": "collective", "step": 2}, {"phase": "generate"}], [0]),
    ],
)
def test_who_was_waited_for(changes: list[dict[str, object]], expected: list[int]) -> None:
    reports = {rank: AT | change for rank, change in enumerate(changes)}
    assert watcher.suspects(reports, world_size=2) == expected


def test_a_rank_that_does_not_answer_was_waited_for() -> None:
    assert watcher.suspects({0: AT}, world_size=3) == [1, 2]


def test_a_sign_of_life_is_read_as_it_was_written() -> None:
    board = heartbeat.Board(heartbeat.memory("test"))
    assert board.read().number == 0
    board.write(7, phase="sync", step=12, saved=10)
    sign = board.read()
    assert (sign.number, sign.phase, sign.step, sign.saved) == (7, "sync", 12, 10)
    assert 0 <= time.monotonic() - sign.time < 60
