"""P1, P2: SIGTERM in every phase of a step, to all at once or to one rank; SIGUSR1 in the middle of one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults import jobs, walks
from tests.integration import runs
from titan_rl.resilience import faults, journal

pytestmark = [pytest.mark.slow, pytest.mark.faults]

# Where a rank waits for some seconds, and the step that is saved: rollouts are given up, a step is not.
PHASES = {
    "rollout.mid": 2,
    "reward.begin": 2,
    "ref_logprobs": 3,
    "forward_backward.0": 3,
    "sync.begin": 3,
    "checkpoint.shard": 4,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    return jobs.start(tmp_path_factory.mktemp("whole") / "run", *walks.SETTINGS, ranks=2).succeed()


def wait_in(folder: Path, point: str, rank: int) -> walks.Job:
    """A job with a rank that waits at a point."""
    fault = faults.Fault(point, 4 if point.startswith("checkpoint") else 3, rank, 0, "slow=4")
    job = walks.start(folder, "resilience.grace_seconds", 10, planted=[fault], max_restarts=0)
    jobs.wait_until(job.run, lambda: faults.witnesses(folder))
    return job


def waiting_pid(job: walks.Job) -> int:
    """Process id of the rank that waits."""
    (witness,) = (job.run.folder / faults.FOLDER).glob("*.json")
    return runs.read_lines(witness)[0]["pid"]


@pytest.mark.parametrize("point", PHASES)
def test_sigterm_to_the_agent_and_the_ranks_in_every_phase(
    point: str, tmp_path: Path, whole: runs.Run
) -> None:
    job = wait_in(tmp_path / "run", point, rank=1)
    (agent,) = job.run.processes
    pids = {agent.pid, waiting_pid(job), job.run.status["pid"]}  # rank 1, and rank 0
    assert len(pids) == 3
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    walks.finish(job, code=1)  # torchrun's own code after SIGTERM
    check_saved_and_resumed(job, PHASES[point], whole)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["rollout.mid", "forward_backward.0", "sync.begin"])
def test_sigterm_to_one_rank_is_a_decision_of_both(
    point: str, rank: int, tmp_path: Path, whole: runs.Run
) -> None:
    """The other rank is in the middle of a phase, and waits for the first in it."""
    job = wait_in(tmp_path / "run", point, rank=rank)
    os.kill(waiting_pid(job), signal.SIGTERM)
    walks.finish(job)
    check_saved_and_resumed(job, PHASES[point], whole)


@pytest.mark.parametrize("point", ["rollout.mid", "forward_backward.0"])
def test_sigusr1_saves_after_the_step_and_the_run_goes_on(
    point: str, tmp_path: Path, whole: runs.Run
) -> None:
    job = wait_in(tmp_path / "run", point, rank=1)
    os.kill(waiting_pid(job), signal.SIGUSR1)
    walks.finish(job)
    assert "Checkpoint of step 3 is complete" in job.run.output()
    walks.check_journal(job.run, whole)


def check_saved_and_resumed(job: walks.Job, step: int, whole: runs.Run) -> None:
    status = job.run.status
    assert (status["outcome"], status["requeue"], status["step"]) == ("preempted", True, step), job.run.tail()
    assert jobs.complete_steps(job.run)[-1] == step
    assert journal.read(job.run.folder)[-1].step == step
    again = jobs.start(job.run.folder, *walks.SETTINGS, "resilience.grace_seconds", 60, ranks=2).succeed()
    walks.check_journal(again, whole)
