"""P1 and P2: SIGTERM saves and ends, SIGUSR1 saves, on all ranks alike and wherever they are."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults import jobs
from tests.integration import runs

pytestmark = pytest.mark.slow

SLOW = {"seconds_per_token": 0.3}  # an iteration samples for more than a second
LONG = ("training.steps", 6, "checkpoint.interval", 100, "resilience.grace_seconds", 100)
EVERY_STEP = ("checkpoint.interval", 1, "resilience.grace_seconds", 100)
PROMPT = 40  # seconds: far from the grace, which is how long a rank waits that does not do what it should


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """The same run on two ranks, never interrupted."""
    return jobs.start(tmp_path_factory.mktemp("whole") / "run", *LONG, ranks=2).succeed()


def recorded(run: runs.Run, iteration: int) -> bool:
    return (run.folder / "rollouts" / f"train-{iteration:06d}.rank-1.jsonl").exists()


def check_preempted(run: runs.Run) -> int:
    """Returns the step that was saved."""
    status = run.status
    assert (status["outcome"], status["requeue"]) == ("preempted", True), run.tail()
    assert jobs.complete_steps(run)[-1:] == [status["step"]]
    assert jobs.leftovers(run) == []
    if len(run.processes) == 2:  # torchrun itself ends with one
        assert "Traceback" not in run.output()
    return status["step"]


def check_resume(run: runs.Run, whole: runs.Run, step: int) -> None:
    resumed = jobs.start(run.folder, *LONG, ranks=2).succeed()
    assert f"Loading the checkpoint from {run.folder}/checkpoint/step-{step}." in resumed.output()
    assert jobs.journal(resumed) == jobs.journal(whole)
    assert resumed.status["outcome"] == "done"


def test_sigterm_to_launcher_and_ranks_while_they_generate(tmp_path: Path, whole: runs.Run) -> None:
    """As a batch system does it: all are signalled, and the launcher signals the ranks once more."""
    run = jobs.torchrun(tmp_path / "run", *LONG, ranks=2, **SLOW)
    jobs.wait_until(run, lambda: recorded(run, 2))
    (agent,) = run.processes
    descendants = jobs.children_of(agent.pid)
    started = time.monotonic()
    ranks = [pid for pid in descendants if "titan_rl.train" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(ranks) == 2
    for pid in [agent.pid, *ranks]:
        os.kill(pid, signal.SIGTERM)
    assert run.wait(60) == [1]  # torchrun's own code: what the ranks did stands in the status
    assert "SignalException" in run.output()
    assert time.monotonic() - started < PROMPT
    assert run.output().count("Stop requested by") == 2
    assert "Ending at once" not in run.output()
    assert jobs.remaining(descendants) == set()
    step = check_preempted(run)
    assert step >= 2
    check_resume(run, whole, step)


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path, whole: runs.Run) -> None:
    """A terminal signals torchrun alone: the ranks are sessions of their own, and it signals them."""
    run = jobs.torchrun(tmp_path / "run", *LONG, ranks=2, **SLOW)
    jobs.wait_until(run, lambda: recorded(run, 1))
    (agent,) = run.processes
    descendants = jobs.children_of(agent.pid)
    agent.send_signal(signal.SIGINT)
    assert run.wait(60) == [1]
    assert "Stop requested by SIGINT" in run.output()
    assert "KeyboardInterrupt" not in run.output()
    assert jobs.remaining(descendants) == set()
    check_resume(run, whole, check_preempted(run))


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_ends_both_at_one_step(rank: int, tmp_path: Path, whole: runs.Run) -> None:
    run = jobs.start(tmp_path / "run", *LONG, ranks=2, **SLOW)
    jobs.wait_until(run, lambda: recorded(run, 1))
    os.kill(run.processes[rank].pid, signal.SIGTERM)
    assert run.wait(60) == [0, 0], run.tail()
    assert run.output().count("because it was asked to; saved.") == 2
    check_resume(run, whole, check_preempted(run))


@pytest.mark.parametrize("step", [3, pytest.param(6, marks=pytest.mark.faults)])
def test_sigterm_in_an_evaluation_leaves_it_to_the_next_start(
    step: int, tmp_path: Path, whole: runs.Run
) -> None:
    settings = (*LONG, "evaluation.interval_steps", 3)
    planted = {"point": "sigterm_in_evaluation", "step": step, "rank": 1}
    run = jobs.start(tmp_path / "run", *settings, ranks=2, **SLOW, **planted)
    assert run.wait(60) == [0, 0], run.tail()
    assert (run.folder / "planted").exists()
    assert check_preempted(run) == step
    resumed = jobs.start(tmp_path / "run", *settings, ranks=2).succeed()
    assert jobs.weights(resumed) == jobs.weights(whole)
    assert list(resumed.summary["scores"]) == ["0", "3", "6"]
    assert resumed.status["outcome"] == "done"


def test_sigterm_while_saving_is_answered_by_that_checkpoint(tmp_path: Path) -> None:
    run = jobs.start(tmp_path / "run", ranks=2, point="slow_save", step=2)
    jobs.wait_until(run, lambda: (run.folder / "planted").exists())
    os.kill(run.processes[1].pid, signal.SIGTERM)
    assert run.wait(60) == [0, 0], run.tail()
    assert check_preempted(run) == 2
    assert run.output().count("Checkpoint of step 2 is complete") == 2  # once on each rank


def test_a_second_sigterm_ends_at_once_with_the_last_checkpoint_valid(tmp_path: Path) -> None:
    run = jobs.start(tmp_path / "run", *EVERY_STEP, ranks=2, point="hang_in_training", step=3, rank=1)
    jobs.wait_until(run, lambda: (run.folder / "planted").exists())
    for process in run.processes:
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGTERM)  # within two seconds: the same request
    time.sleep(3)
    assert all(process.is_alive() for process in run.processes), run.tail()
    for process in run.processes:
        os.kill(process.pid, signal.SIGTERM)
    started = time.monotonic()
    assert run.wait(60) == [143, 143], run.tail()
    assert time.monotonic() - started < PROMPT
    assert "Ending at once: asked again, by SIGTERM" in run.output()
    assert check_preempted(run) == 2


@pytest.mark.faults
def test_a_second_sigterm_to_the_launcher_reaches_the_ranks(tmp_path: Path) -> None:
    run = jobs.torchrun(tmp_path / "run", *EVERY_STEP, ranks=2, point="hang_in_training", step=3, rank=1)
    jobs.wait_until(run, lambda: (run.folder / "planted").exists())
    (agent,) = run.processes
    descendants = jobs.children_of(agent.pid)
    agent.terminate()
    time.sleep(3)
    agent.terminate()
    started = time.monotonic()
    run.wait(60)
    assert time.monotonic() - started < PROMPT
    assert "Ending at once: asked again, by SIGTERM" in run.output()
    assert jobs.remaining(descendants) == set()
    assert check_preempted(run) == 2


def test_a_rank_that_fails_is_what_the_status_names(tmp_path: Path) -> None:
    """The other one fails too, in the collective that it waits in."""
    run = jobs.start(tmp_path / "run", *LONG, ranks=2, point="raise_in_training", step=2, rank=1)
    assert run.wait(60) == [1, 1], run.tail()
    assert run.status["outcome"] == "failed"
    assert run.status["cause"] == "[rank 1] ValueError: planted in the optimiser step"
    assert run.status["requeue"] is False


def test_when_the_grace_is_over_the_ranks_end_with_what_they_have(tmp_path: Path) -> None:
    settings = ("checkpoint.interval", 1, "resilience.grace_seconds", 3)
    run = jobs.start(tmp_path / "run", *settings, ranks=2, point="hang_in_training", step=3, rank=1)
    jobs.wait_until(run, lambda: (run.folder / "planted").exists())
    os.kill(run.processes[0].pid, signal.SIGTERM)
    assert run.wait(60) == [143, 143], run.tail()
    assert "Ending at once: 3 s of grace are over" in run.output()
    assert check_preempted(run) == 2


def test_a_rank_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    """The others would wait in a collective for as long as the grace lasts."""
    run = jobs.start(tmp_path / "run", *LONG, "checkpoint.interval", 1, ranks=2, **SLOW)
    jobs.wait_until(run, lambda: recorded(run, 2))
    os.kill(run.processes[1].pid, signal.SIGSTOP)
    os.kill(run.processes[0].pid, signal.SIGTERM)
    started = time.monotonic()
    run.processes[0].join(60)
    assert run.processes[0].exitcode == 143, run.tail()
    assert time.monotonic() - started < PROMPT
    os.kill(run.processes[1].pid, signal.SIGKILL)
    assert "Ending at once: rank 1 does not answer" in run.output()
    assert check_preempted(run) in (1, 2)


def test_sigusr1_saves_once_and_the_run_goes_on(tmp_path: Path, whole: runs.Run) -> None:
    run = jobs.start(tmp_path / "run", *LONG, ranks=2, seconds_per_token=0.05)
    jobs.wait_until(run, lambda: recorded(run, 2))
    os.kill(run.status["pid"], signal.SIGUSR1)
    run.succeed()
    saved = jobs.complete_steps(run)
    assert len(saved) == 2
    assert saved[0] in (2, 3)
    assert saved[1] == 6
    assert jobs.journal(run) == jobs.journal(whole)


def test_a_time_limit_ends_cleanly_and_the_same_command_goes_on(tmp_path: Path, whole: runs.Run) -> None:
    run = jobs.start(tmp_path / "run", *LONG, "resilience.stop_after_minutes", 0.1, ranks=2, **SLOW)
    assert run.wait(60) == [0, 0], run.tail()
    status = run.status
    assert (status["outcome"], status["requeue"]) == ("time_limit", True)
    assert jobs.complete_steps(run) == [status["step"]]
    check_resume(run, whole, status["step"])


def test_a_supervised_run_and_a_run_on_pairs_stop_alike(tmp_path: Path) -> None:
    for config in ("sft", "dpo"):
        run = jobs.start(tmp_path / config, "training.steps", 100000, config=config, ranks=2)
        jobs.wait_until(run, lambda run=run: jobs.complete_steps(run))
        os.kill(run.processes[1].pid, signal.SIGTERM)
        assert run.wait(60) == [0, 0], run.tail()
        check_preempted(run)


@pytest.mark.parametrize(
    ("config", "file", "key"),
    [
        ("sft", "validation.json", "steps"),
        pytest.param("dpo", "summary.json", "evaluations", marks=pytest.mark.faults),
    ],
)
@pytest.mark.parametrize("step", [2, pytest.param(4, marks=pytest.mark.faults)])
def test_sigterm_in_an_evaluation_without_rollouts_leaves_it_to_the_next_start(
    config: str, file: str, key: str, step: int, tmp_path: Path
) -> None:
    """The signal comes when held-out documents or pairs are about to be scored, after the last step too."""
    interval = "validation.interval_steps" if config == "sft" else "evaluation.interval_steps"
    settings = ("training.steps", 4, "checkpoint.interval", 4, interval, 2, "resilience.grace_seconds", 100)
    arguments = runs.arguments(jobs.CONFIGS / f"{config}.toml", settings, tmp_path / "run")
    run = runs.fork(jobs.stopped_in_evaluation, arguments, step, folder=tmp_path / "run", ranks=2)
    assert run.wait(120) == [0, 0], run.tail()
    assert (run.folder / "planted").exists()
    assert check_preempted(run) == step
    assert str(step) not in run.json(file)[key]
    resumed = jobs.start(tmp_path / "run", *settings, config=config, ranks=2).succeed()
    assert sorted(resumed.json(file)[key]) == ["0", "2", "4"]
    whole = jobs.start(tmp_path / "whole", *settings, config=config, ranks=2).succeed()
    assert resumed.json(file)[key] == whole.json(file)[key]
    assert jobs.weights(resumed) == jobs.weights(whole)
