"""One job that fails at one planted fault after the other, and what has to hold at its end.

Each start of the job does one fault; torchrun's agent starts the ranks again, and they go on from the newest
checkpoint. At the end the journal is compared with that of a run without faults. What was measured is added
to the file that ``TITAN_RL_FAULT_RESULTS`` names, from which docs/reliability.md gets its table.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from tests.faults import jobs
from tests.integration import runs
from titan_rl.resilience import faults, journal, shelf

STEPS = 7
SETTINGS = (
    "training.steps", STEPS,
    "checkpoint.interval", 2,
    "checkpoint.keep_latest_k", 2,
    "resilience.keep_best", 0,
    "evaluation.interval_steps", 3,
    "resilience.journal_parameters", "true",
)  # fmt: skip
"""A checkpoint after steps 2, 4 and 6, with which that of step 2 goes, and after the last."""

IN_STEP_3 = (
    *("data.next", "rollout.begin", "rollout.mid", "rollout.end", "reward.begin", "reward.mid"),
    *("old_logprobs", "ref_logprobs", "advantage", "forward_backward.0", "optimizer.before"),
    *("optimizer.after", "sync.begin", "sync.bucket.0", "sync.bucket.7", "sync.end", "evaluation"),
)
EVERY_POINT = (
    *((point, 3) for point in IN_STEP_3),
    *(("sync.begin", 0), ("sync.bucket.1", 0)),  # while it recovers from the fault before, and again
    *(("checkpoint.stage", 4), ("checkpoint.shard", 4), ("checkpoint.before_commit", 4)),
    *(("checkpoint.after_commit", 6), ("checkpoint.purge", STEPS), ("shutdown", STEPS)),
)
"""Every point with the step in which it is met. Between two faults of step 3 nothing is saved: each start is
killed before the run has come any further. Rank 0 may still make a commit before which rank 1 is killed."""

SECONDS_PER_FAULT = {
    "warm": 60,
    "launch": 60,
    "torchrun": 120,
}  # a deadline for a machine that is busy with other tests


@dataclass(slots=True)
class Job:
    """A run under torchrun's agent.

    Attributes:
        planted: Its faults.
        started: Time of the start, in seconds since the epoch.
        mark: What the environment of all its processes holds.
        temporary: Their directory for temporary files.
        launcher: ``torchrun``; ``launch`` for :mod:`titan_rl.launch`; ``warm`` for
            :mod:`tests.faults.warm_agent`.
        fewest: Complete checkpoints at every moment after the first was complete; None before.
    """

    run: runs.Run
    planted: Sequence[faults.Fault]
    mark: str
    temporary: Path
    launcher: str
    shared_before: set[str]
    fewest: int | None = None
    is_over: threading.Event = field(default_factory=threading.Event)


def plan(points: Iterable[tuple[str, int]], *, first_rank: int, mode: str = "sigkill") -> list[faults.Fault]:
    """One fault for each start, on ranks 0 and 1 by turns.

    Args:
        points: With the step of each.
        first_rank: Which has the first.
        mode: What happens.
    """
    return [
        faults.Fault(point, step, (first_rank + attempt) % 2, attempt, mode)
        for attempt, (point, step) in enumerate(points)
    ]


def start(
    folder: Path,
    *overrides: object,
    planted: Sequence[faults.Fault] = (),
    ranks: int = 2,
    launcher: str = "warm",
    max_restarts: int | None = None,
) -> Job:
    """Start a job with as many restarts as it has faults.

    Args:
        folder: Its ``dump_folder``.
        overrides: ``"section.key", value`` pairs besides ``SETTINGS``.
        planted: Its faults.
        ranks: Number of processes.
        launcher: ``torchrun``, ``launch`` or ``warm``.
        max_restarts: Another number of restarts.
    """
    restarts = str(len(planted) if max_restarts is None else max_restarts)
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    command = [sys.executable, "-m", "tests.faults.warm_agent", *options]
    if launcher != "warm":
        module = {"torchrun": "torch.distributed.run", "launch": "titan_rl.launch"}[launcher]
        command = [sys.executable, "-m", module, "--standalone", "--monitor-interval=0.1", *options]
        command += ["-m", "titan_rl.train"] if launcher == "torchrun" else []
    arguments = runs.arguments(jobs.CONFIGS / "grpo.toml", (*SETTINGS, *overrides), folder)
    # Not below the test's own: the path of a socket has at most 107 characters.
    temporary, mark = Path(tempfile.mkdtemp(prefix="job_")), uuid.uuid4().hex
    environment = {"TMPDIR": str(temporary), "TITAN_RL_TEST_JOB": mark}
    if planted:
        environment[faults.VARIABLE] = ";".join(map(str, planted))
    before = _shared_memory()
    run = runs.spawn([*command, *arguments], folder=folder, environment=environment)
    job = Job(run, planted, mark, temporary, launcher, before)
    threading.Thread(target=_watch_checkpoints, args=(job,), daemon=True).start()
    return job


def finish(job: Job, *, code: int = 0, deadline: float | None = None) -> None:
    """Wait for the end, within the deadline, and look at what holds for every job.

    Each fault has left its witness and one line in the log; nothing that belonged to the job is left; and at
    no moment was there no complete checkpoint, once there was one.

    Args:
        job: Under way.
        code: The agent's exit code.
        deadline: In seconds; by default so much for each fault.
    """
    codes = job.run.wait(deadline or SECONDS_PER_FAULT[job.launcher] * (len(job.planted) + 2))
    job.is_over.set()
    assert codes == [code], job.run.tail()
    missing = set(job.planted) - set(faults.witnesses(job.run.folder))
    assert not missing, missing
    output = job.run.output()
    for fault in job.planted:
        line = f"[rank {fault.rank}] Fault: planted {fault.mode} at {fault.point}, step {fault.step}, attempt"
        assert output.count(f"{line} {fault.attempt}.") == 1, fault
    left = remaining(job)
    assert not left, left
    assert jobs.leftovers(job.run) == []
    assert job.fewest is None or job.fewest >= 1
    shutil.rmtree(job.temporary)


def check_journal(run: runs.Run, whole: runs.Run) -> None:
    """It is that of the run without faults, bit for bit, and so is all that it repeated."""
    expected = journal.read(whole.folder)
    assert [entry.step for entry in expected] == list(range(1, len(expected) + 1))
    assert all(entry.parameters for entry in expected)
    assert journal.read(run.folder) == expected
    assert journal.differing_repeats(run.folder) == []
    assert jobs.weights(run) == jobs.weights(whole)
    assert run.status["outcome"] == "done"


def remaining(job: Job) -> list[str]:
    """Processes, shared memory and temporary files of a job that has ended."""
    # The fork server ends when it sees that its last rank and the agent have.
    deadline = time.monotonic() + 20.0
    while (pids := processes(job.mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [f"process {pid}: {command_of(pid)}" for pid in pids]
    left += [f"/dev/shm/{name}" for name in _shared_memory() - job.shared_before if not _is_mapped(name)]
    names = [path.name for path in job.temporary.iterdir()]
    # torchrun keeps the directory for its ranks' logs, and torch its cache of kernels.
    return left + [name for name in names if not name.startswith(("torchelastic_", "torchinductor_"))]


# ---------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, slots=True)
class Measured:
    """One fault, in seconds and optimiser steps.

    Attributes:
        detection: From the fault until the agent had noticed.
        restart: From the fault until the next start had built everything and loaded the checkpoint; None
            when it was killed before.
        lost: Steps that were done and had to be done again.
    """

    detection: float
    restart: float | None
    lost: int


def measure(run: runs.Run) -> list[Measured]:
    """What each fault cost."""
    lines = runs.read_lines(run.folder / "journal" / "rank-0.jsonl")
    begun = [(line["time"], line["resumed_step"]) for line in lines if "resumed_step" in line]
    done = [(line["time"], line["step"]) for line in lines if "step" in line]
    noticed, times = _times_of_failures(run.output()), sorted(faults.witnesses(run.folder).values())
    found = []
    for number, at in enumerate(times):
        until = times[number + 1] if times[number + 1 :] else float("inf")
        restored, resumed = next(((when, step) for when, step in begun if at < when <= until), (None, None))
        first = max((when for when, _ in begun if when < at), default=0.0)
        step = max((step for when, step in done if first < when < at), default=0)
        found.append(
            Measured(
                detection=min(when for when in noticed if when >= at) - at,
                restart=None if restored is None else restored - at,
                lost=max(step - resumed, 0) if resumed is not None else 0,
            )
        )
    return found


def first_steps(run: runs.Run) -> list[float]:
    """Seconds from a loaded checkpoint to the end of the first step after it: push, rollouts, training."""
    lines = runs.read_lines(run.folder / "journal" / "rank-0.jsonl")
    return [
        b["time"] - a["time"] for a, b in itertools.pairwise(lines) if "resumed_step" in a and "step" in b
    ]


def note(case: str, job: Job, *, is_bitwise: bool = True) -> None:
    """Add one row to the results: medians over the job's faults."""
    path = os.environ.get("TITAN_RL_FAULT_RESULTS")
    if path is not None:
        with Path(path).open("a") as stream:
            stream.write(json.dumps(row(case, job.run, job.launcher) | {"bitwise": is_bitwise}) + "\n")


def row(case: str, run: runs.Run, launcher: str) -> dict[str, object]:
    """A row of the table; the first start, which nothing was lost before, counts for no first step."""
    costs = measure(run)
    restarts = [cost.restart for cost in costs if cost.restart is not None]
    return {
        "case": case,
        "launcher": launcher,
        "faults": len(costs),
        "detection": statistics.median(cost.detection for cost in costs),
        "restart": statistics.median(restarts) if restarts else None,
        "longest_restart": max(restarts, default=None),
        "first_step": statistics.median(first_steps(run)[1:] or first_steps(run)),
        "lost": max(cost.lost for cost in costs),
    }


def _times_of_failures(output: str) -> list[float]:
    """When the agent wrote that a rank had ended."""
    year = datetime.now().year
    pattern = r"^E(\d\d)(\d\d) (\d\d):(\d\d):(\d\d\.\d+) .*failed \(exitcode"
    return [
        datetime(year, int(month), int(day), int(hour), int(minute)).timestamp() + float(second)
        for month, day, hour, minute, second in re.findall(pattern, output, re.MULTILINE)
    ]


# ----------------------------------------------------------------------------------------- what is left


def _watch_checkpoints(job: Job) -> None:
    """In a thread: how few complete checkpoints there ever are."""
    folder = job.run.folder / "checkpoint"
    while not job.is_over.wait(0.05):
        # What is renamed meanwhile can be missed once: look again.
        count = max(len(shelf.complete(shelf.entries(folder))) for _ in range(2))
        if count or job.fewest is not None:
            job.fewest = count if job.fewest is None else min(job.fewest, count)


def processes(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_ours = mark.encode() in path.read_bytes()
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if is_ours and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"


def _shared_memory() -> set[str]:
    """Without the semaphores of Python's queues, which titan_rl has none of and other tests leave behind."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


def _is_mapped(name: str) -> bool:
    """Whether a living process uses it: another test's, then."""
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"/dev/shm/{name}" in path.read_text():
                return True
        except OSError:
            continue
    return False
