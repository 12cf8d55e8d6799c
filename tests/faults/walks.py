"""One job that fails at one planted fault after the other, and what has to hold at its end.

Each start of the job does one fault; torchrun's agent starts the ranks again, and they go on from the newest
checkpoint. At the end the journal is compared with that of a run without faults. What was measured is added
to the file that ``TITAN_RL_FAULT_RESULTS`` names, from which docs/reliability.md gets its table.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
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
    *(("checkpoint.after_commit", 4), ("checkpoint.purge", 6), ("shutdown", STEPS)),
)
"""Every point with the step in which it is met. Between two faults of step 3 nothing is saved: each start is
killed before the run has come any further."""

SECONDS_PER_FAULT = {"warm": 60, "torchrun": 120}  # a deadline for a machine that is busy with other tests


@dataclass(slots=True)
class Job:
    """A run under torchrun's agent.

    Attributes:
        planted: Its faults.
        started: Time of the start, in seconds since the epoch.
        mark: What the environment of all its processes holds.
        temporary: Their directory for temporary files.
        launcher: ``torchrun``, or ``warm`` for :mod:`tests.faults.warm_agent`.
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
        launcher: ``torchrun`` or ``warm``.
        max_restarts: Another number of restarts.
    """
    restarts = str(len(planted) if max_restarts is None else max_restarts)
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    command = [sys.executable, "-m", "tests.faults.warm_agent", *options]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval=0.1"]
        command += [*options, "-m", "titan_rl.train"]
    arguments = runs.arguments(jobs.CONFIGS / "grpo.toml", (*SETTINGS, *overrides), folder)
    temporary, mark = folder.with_name(folder.name + ".tmp"), uuid.uuid4().hex
    temporary.mkdir(parents=True, exist_ok=True)
    environment = {"TMPDIR": str(temporary), "TITAN_RL_TEST_JOB": mark}
    if planted:
        environment[faults.VARIABLE] = ";".join(map(str, planted))
    before = _shared_memory()
    run = runs.spawn([*command, *arguments], folder=folder, environment=environment)
    job = Job(run, planted, mark, temporary, launcher, before)
    threading.Thread(target=_watch_checkpoints, args=(job,), daemon=True).start()
    return job


def finish(job: Job, *, code: int = 0) -> None:
    """Wait for the end, within the deadline, and look at what holds for every job.

    Each fault has left its witness and one line in the log; nothing that belonged to the job is left; and at
    no moment was there no complete checkpoint, once there was one.
    """
    deadline = SECONDS_PER_FAULT[job.launcher] * (len(job.planted) + 2)
    codes = job.run.wait(deadline)
    job.is_over.set()
    assert codes == [code], job.run.tail()
    assert set(faults.witnesses(job.run.folder)) == set(job.planted)
    output = job.run.output()
    for fault in job.planted:
        line = f"[rank {fault.rank}] Fault: planted {fault.mode} at {fault.point}, step {fault.step}, attempt"
        assert output.count(f"{line} {fault.attempt}.") == 1, fault
    left = remaining(job)
    assert not left, left
    assert jobs.leftovers(job.run) == []
    assert job.fewest is None or job.fewest >= 1


def check_journal(job: Job, whole: runs.Run) -> None:
    """It is that of the run without faults, bit for bit, and so is all that it repeated."""
    expected = journal.read(whole.folder)
    assert [entry.step for entry in expected] == list(range(1, len(expected) + 1))
    assert all(entry.parameters for entry in expected)
    assert journal.read(job.run.folder) == expected
    assert journal.differing_repeats(job.run.folder) == []
    assert jobs.weights(job.run) == jobs.weights(whole)
    assert job.run.status["outcome"] == "done"


def remaining(job: Job) -> list[str]:
    """Processes, shared memory and temporary files of a job that has ended."""
    deadline = time.monotonic() + 5.0
    while (pids := processes(job.mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [f"process {pid}: {_command(pid)}" for pid in pids]
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
        recovery: From the fault until the next step was done; None when none followed.
        lost: Steps that were done and had to be done again.
    """

    detection: float
    recovery: float | None
    lost: int


def measure(job: Job) -> dict[faults.Fault, Measured]:
    """What each fault cost."""
    lines = runs.read_lines(job.run.folder / "journal" / "rank-0.jsonl")
    begun = {line["start"]: line["resumed_step"] for line in lines if "resumed_step" in line}
    done = [(line["time"], line["start"], line["step"]) for line in lines if "step" in line]
    noticed = sorted(_times_of_failures(job.run.output()))
    found = {}
    for fault, at in faults.witnesses(job.run.folder).items():
        detected = next((when for when in noticed if when >= at), None)
        assert detected is not None, f"{fault}: the agent has noticed nothing"
        next_done = next((when for when, *_ in done if when > at), None)
        before = [(start, step) for when, start, step in done if when < at]
        start, step = before[-1] if before else (0, 0)
        resumed = begun.get(start + 1, step)
        found[fault] = Measured(
            detected - at, None if next_done is None else next_done - at, max(step - resumed, 0)
        )
    return found


def note(case: str, job: Job, *, is_bitwise: bool = True) -> None:
    """Add one row to the results: medians over the job's faults."""
    path = os.environ.get("TITAN_RL_FAULT_RESULTS")
    if path is None:
        return
    costs = list(measure(job).values())
    recoveries = [cost.recovery for cost in costs if cost.recovery is not None]
    row = {
        "case": case,
        "launcher": job.launcher,
        "faults": len(costs),
        "detection": statistics.median(cost.detection for cost in costs),
        "recovery": statistics.median(recoveries) if recoveries else None,
        "longest_recovery": max(recoveries, default=None),
        "lost": max(cost.lost for cost in costs),
        "bitwise": is_bitwise,
    }
    with Path(path).open("a") as stream:
        stream.write(json.dumps(row) + "\n")


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


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _is_mapped(name: str) -> bool:
    """Whether a living process uses it: another test's, then."""
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"/dev/shm/{name}" in path.read_text():
                return True
        except OSError:
            continue
    return False
