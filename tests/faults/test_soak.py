"""M1: 200 steps under kills at random times end where 200 steps without them do, and nothing grows.

``make soak``. Kills are a Poisson process: the times between them are exponential, whatever the run does
then, also while it starts. The rank is drawn. Printed are what the kills cost, and memory, open files and
threads early and late: of the launcher and its fork server in the job that is killed, whose ranks are young,
and of the ranks in the run without kills.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults import jobs, walks
from titan_rl.resilience import journal

pytestmark = pytest.mark.soak

STEPS = int(os.environ.get("TITAN_RL_SOAK_STEPS", "200"))
MEAN_SECONDS = 15.0
SEED = 0
FEWEST_KILLS = STEPS // 20
SETTINGS = (
    "training.steps", STEPS,
    "checkpoint.interval", 5,
    "checkpoint.keep_latest_k", 2,
    "evaluation.interval_steps", 50,
    "resilience.keep_best", 0,
    "resilience.journal_parameters", "true",
)  # fmt: skip
DEADLINE_SECONDS = 2400
GROWTH_OF_MEMORY = 0.1  # from the second quarter of a run to the last, which caches that fill slowly explain


@dataclass(frozen=True, slots=True)
class Use:
    """What a group of processes holds, added up."""

    mib: float
    files: int
    threads: int


@dataclass(slots=True)
class Watch:
    """Looks at processes once a second, in a thread.

    Attributes:
        pids: Whose; asked each time.
        seen: All that was seen.
    """

    pids: Callable[[], Iterable[int]]
    seen: list[Use] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _look(self) -> None:
        while not self._is_over.wait(1.0):
            try:
                found = [use_of(pid) for pid in self.pids()]
            except OSError:
                continue  # one has just ended
            if found:
                self.seen.append(
                    Use(sum(u.mib for u in found), sum(u.files for u in found), sum(u.threads for u in found))
                )

    def early_and_late(self) -> tuple[Use, Use]:
        """Medians over the second quarter and over the last."""
        size = len(self.seen) // 4
        assert size >= 5, self.seen
        parts = (self.seen[size : 2 * size], self.seen[-size:])
        names = ("mib", "files", "threads")
        early, late = (
            Use(*(statistics.median(getattr(use, name) for use in part) for name in names)) for part in parts
        )
        return early, late


def use_of(pid: int) -> Use:
    status = Path(f"/proc/{pid}/status").read_text()
    value = {line.partition(":")[0]: line.split()[1] for line in status.splitlines() if len(line.split()) > 1}
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Use(int(value["VmRSS"]) / 1024, files, int(value["Threads"]))


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for task in tasks for child in task.read_text().split())


def fork_server(agent: int) -> int | None:
    return next((pid for pid in children(agent) if "forkserver" in walks.command_of(pid)), None)


def ranks_of(agent: int) -> list[int]:
    server = fork_server(agent)
    return [] if server is None else children(server)


def kill_now_and_then(job: walks.Job, killed: list[float]) -> None:
    """In a thread: until the job is over."""
    draw = random.Random(SEED)
    (agent,) = job.run.processes
    while not job.is_over.wait(draw.expovariate(1 / MEAN_SECONDS)):
        choice = draw.random()
        try:
            ranks = ranks_of(agent.pid)
            # The last line of a rank is no place of a step: the agent would wait for the other one.
            if ranks and not is_done(job):
                os.kill(ranks[int(choice * len(ranks))], signal.SIGKILL)
                killed.append(time.time())
        except (OSError, ValueError):
            continue  # it ended by itself, or a line of the journal was being written


def is_done(job: walks.Job) -> bool:
    lines = journal.read(job.run.folder) if (job.run.folder / "journal").is_dir() else []
    return bool(lines) and lines[-1].step == STEPS


def test_two_hundred_steps_under_random_kills_end_where_they_do_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    whole = jobs.start(tmp_path / "whole" / "run", *SETTINGS, ranks=2)
    with Watch(lambda: [process.pid for process in whole.processes]) as of_ranks:
        whole.succeed(DEADLINE_SECONDS)
    undisturbed = time.monotonic() - begun

    begun, killed = time.monotonic(), []
    job = walks.start(tmp_path / "run", *SETTINGS, max_restarts=1000)
    (agent,) = job.run.processes
    killer = threading.Thread(target=kill_now_and_then, args=(job, killed), daemon=True)
    killer.start()
    with Watch(lambda: [agent.pid, *filter(None, [fork_server(agent.pid)])]) as of_agent:
        walks.finish(job, deadline=DEADLINE_SECONDS)
    disturbed = time.monotonic() - begun

    walks.check_journal(job.run, whole)
    assert len(journal.read(job.run.folder)) == STEPS
    assert len(killed) >= FEWEST_KILLS, killed
    report(capsys, job, kills=len(killed), seconds=(undisturbed, disturbed), watches=(of_ranks, of_agent))
    for watch in (of_ranks, of_agent):
        early, late = watch.early_and_late()
        assert late.mib <= early.mib * (1 + GROWTH_OF_MEMORY), (early, late)
        assert late.files <= early.files, (early, late)
        assert late.threads <= early.threads, (early, late)


def report(
    capsys: pytest.CaptureFixture[str],
    job: walks.Job,
    *,
    kills: int,
    seconds: tuple[float, float],
    watches: tuple[Watch, Watch],
) -> None:
    lines = [line for rank in (0, 1) for line in steps_done(job, rank)]
    again = len(lines) / 2 - STEPS
    with capsys.disabled():
        print(f"\n{STEPS} steps, {kills} kills, one in {MEAN_SECONDS:g} s on average, seed {SEED}.")
        print(f"Steps that were done again: {again:g}.")
        print(f"Seconds: {seconds[0]:.0f} without kills, {seconds[1]:.0f} with them.")
        print(f"Goodput, time without kills by time with them: {seconds[0] / seconds[1]:.2f}.")
        for name, watch in zip(("ranks, without kills", "launcher, with them"), watches, strict=True):
            early, late = watch.early_and_late()
            print(
                f"{name}: {early.mib:.0f} MiB early, {late.mib:.0f} late; "
                f"{early.files:g} and {late.files:g} files; {early.threads:g} and {late.threads:g} threads."
            )


def steps_done(job: walks.Job, rank: int) -> list[dict[str, object]]:
    lines = walks.runs.read_lines(job.run.folder / "journal" / f"rank-{rank}.jsonl")
    return [line for line in lines if "step" in line]
