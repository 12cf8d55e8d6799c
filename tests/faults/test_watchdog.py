"""R3 and R4: a rank that hangs is found, named and ended with the others; a slow one is only named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults import jobs
from tests.integration import runs

pytestmark = pytest.mark.slow

LIMIT = 15
DEADLINES = [
    part
    for name in ("data", "generate", "reward", "train", "sync", "checkpoint", "collective")
    for part in (f"resilience.watchdog.{name}_seconds", LIMIT)
] + ["sampling.timeout_seconds", 7]
EVERY_STEP = ("checkpoint.interval", 1, "checkpoint.keep_latest_k", 10)
LINE = re.compile(
    r"Watchdog: rank (\d) made no progress for (\d+) s in train of step (\d) \(([a-z ]+)\), longer than "
    r"resilience.watchdog.train_seconds = 15; rank (\d) for (\d+) s in train of step \d \(([a-z ]+)\). "
    r"Waited for: (rank \d|no rank in particular). All ranks end now."
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """The same run on two ranks, in which nothing happens."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return jobs.start(folder, *EVERY_STEP, *DEADLINES, ranks=2).succeed()


@pytest.mark.faults
def test_ranks_that_hang_are_found_and_the_restart_repeats_the_run(tmp_path: Path, whole: runs.Run) -> None:
    """Stopped, looping, and waiting for a rank that skipped a collective: three starts after the first."""
    planted = {"point": "hang_in_three_ways", "step": 2, "rank": -1}
    run = jobs.torchrun(tmp_path / "run", *EVERY_STEP, *DEADLINES, ranks=2, restarts=3, **planted)
    jobs.wait_until(run, lambda: (run.folder / "planted-0").exists())
    descendants = jobs.children_of(run.processes[0].pid)
    run.succeed()
    assert all((run.folder / f"planted-{number}").exists() for number in range(3))
    text = run.output()
    found = LINE.findall(text)
    assert [line[2] for line in found] == ["2", "3", "4"]
    assert all(LIMIT <= int(line[1]) <= LIMIT + 5 for line in found)
    # Who is stopped or loops is named; of two ranks that wait in different collectives, neither.
    assert [line[7] for line in found] == ["rank 1", "rank 0", "no rank in particular"]
    states = [{line[0]: line[3], line[4]: line[6]} for line in found]
    assert states[0] == {"0": "waiting", "1": "stopped"}
    assert states[1] == {"0": "running", "1": "waiting"}
    assert states[2] == {"0": "waiting", "1": "waiting"}
    # One that is stopped cannot print its stack; all others did.
    assert text.count("Watchdog: stacks of rank 0") == text.count("Watchdog: stacks of rank 1") == 3
    assert text.count("none: a process that is stopped cannot print it") == 1
    assert re.search(r"in _loop_on_rank_0", text)
    assert re.search(r"in _skip_on_rank_1", text)
    assert len(list((run.folder / "watchdog").glob("*/line.txt"))) == 3
    assert jobs.remaining(descendants) == set()
    assert jobs.journal(run) == jobs.journal(whole)


def test_a_hang_without_restarts_left_ends_the_run_and_says_why(tmp_path: Path) -> None:
    planted = {"point": "hang_in_three_ways", "step": 3, "rank": -1}
    run = jobs.start(tmp_path / "run", *EVERY_STEP, *DEADLINES, ranks=2, **planted)
    assert run.wait(120) == [-9, -9], run.tail()
    status = run.status
    assert (status["outcome"], status["requeue"], status["step"]) == ("failed", True, 2)
    assert LINE.match(status["cause"])
    assert jobs.complete_steps(run) == [1, 2]


def test_without_a_watchdog_nothing_is_started(tmp_path: Path) -> None:
    run = jobs.start(tmp_path / "run", "training.steps", 100000, "resilience.watchdog", "none")
    jobs.wait_until(run, lambda: jobs.complete_steps(run))
    pid = run.processes[0].pid
    assert not any(is_watcher(child) for child in jobs.children_of(pid))
    run.processes[0].kill()


def is_watcher(pid: int) -> bool:
    return b"titan_rl.resilience import watcher" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_watcher_ends_with_its_rank_however_that_ends(tmp_path: Path) -> None:
    run = jobs.start(tmp_path / "run", "training.steps", 100000)
    jobs.wait_until(run, lambda: jobs.complete_steps(run))
    watchers = {child for child in jobs.children_of(run.processes[0].pid) if is_watcher(child)}
    assert len(watchers) == 1
    run.processes[0].kill()
    assert jobs.remaining(watchers) == set()


def test_a_slow_rank_is_named_and_not_ended(tmp_path: Path) -> None:
    run = jobs.start(tmp_path / "run", *DEADLINES, ranks=2, point="slow_training", rank=-1).succeed()
    metrics = run.metrics()
    for step in range(1, 7):
        assert metrics["straggler/train_rank"][step] == 1.0
        assert metrics["straggler/train"][step] > 1.5
    assert "Watchdog: rank" not in run.output()
