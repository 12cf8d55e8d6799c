"""R1, R2, C1, D2: killed at every point, on either rank, a run ends with the journal of one that was not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import jobs, walks
from tests.integration import runs
from titan_rl.resilience import faults, journal

pytestmark = pytest.mark.slow

VARIANTS: dict[str, tuple[object, ...]] = {
    "grpo": (),
    "ppo": ("algorithm.type", "ppo"),
    "async": ("checkpoint.async_mode", "async"),
    "every step": ("checkpoint.interval", 1),
    "vllm": ("generator.type", "vllm", "generator.kv_cache_gib", 0.125),
}
FOR_MAKE_TEST = (("rollout.mid", 3), ("sync.bucket.1", 0), ("forward_backward.0", 3), ("checkpoint.shard", 4))
CHECKPOINTS = tuple((point, step) for point, step in walks.EVERY_POINT if point.startswith("checkpoint."))
# Resumed from every step, twice in a row: the first start after a checkpoint gets no further than its first
# prompt. The 23 prompts of an epoch are used up in step 6.
EVERY_STEP = tuple(
    place
    for step in range(1, walks.STEPS)
    for place in (("checkpoint.after_commit", step), ("data.next", step + 1))
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], runs.Run]:
    """The same run on two ranks without faults, by variant."""

    @functools.cache
    def of(variant: str) -> runs.Run:
        folder = tmp_path_factory.mktemp(variant.replace(" ", "_")) / "run"
        return jobs.start(folder, *walks.SETTINGS, *VARIANTS[variant], ranks=2).succeed()

    return of


def walk(
    tmp_path: Path, whole: Callable[[str], runs.Run], variant: str, planted: list[faults.Fault], **given: str
) -> walks.Job:
    """Start a job, see it through its faults, and compare its journal."""
    job = walks.start(tmp_path / "run", *VARIANTS[variant], planted=planted, **given)
    walks.finish(job)
    walks.check_journal(job.run, whole(variant))
    return job


def test_killed_at_some_points_on_either_rank(tmp_path: Path, whole: Callable[[str], runs.Run]) -> None:
    walk(tmp_path, whole, "grpo", walks.plan(FOR_MAKE_TEST, first_rank=0))


@pytest.mark.faults
@pytest.mark.parametrize("first_rank", [0, 1])
@pytest.mark.parametrize("variant", ["grpo", "ppo"])
def test_killed_at_every_point_on_either_rank(
    variant: str, first_rank: int, tmp_path: Path, whole: Callable[[str], runs.Run]
) -> None:
    job = walk(tmp_path, whole, variant, walks.plan(walks.EVERY_POINT, first_rank=first_rank))
    walks.note(f"R1 {variant}, first on rank {first_rank}", job)


@pytest.mark.faults
@pytest.mark.parametrize("first_rank", [0, 1])
def test_killed_at_every_point_with_vllm(
    first_rank: int, tmp_path: Path, whole: Callable[[str], runs.Run]
) -> None:
    pytest.importorskip("vllm")
    job = walk(tmp_path, whole, "vllm", walks.plan(walks.EVERY_POINT, first_rank=first_rank))
    walks.note(f"R1 grpo with vLLM, first on rank {first_rank}", job)


@pytest.mark.faults
@pytest.mark.parametrize("variant", ["grpo", "vllm"])
def test_killed_under_torchrun_where_every_restart_imports_everything(
    variant: str, tmp_path: Path, whole: Callable[[str], runs.Run]
) -> None:
    if variant == "vllm":
        pytest.importorskip("vllm")
    planted = walks.plan(FOR_MAKE_TEST, first_rank=1)
    job = walk(tmp_path, whole, variant, planted, launcher="torchrun")
    walks.note(f"R1 {variant}, torchrun", job)


@pytest.mark.faults
@pytest.mark.parametrize("variant", ["grpo", "vllm"])
def test_killed_under_our_launcher(variant: str, tmp_path: Path, whole: Callable[[str], runs.Run]) -> None:
    if variant == "vllm":
        pytest.importorskip("vllm")
    planted = walks.plan(FOR_MAKE_TEST, first_rank=1)
    job = walk(tmp_path, whole, variant, planted, launcher="launch")
    walks.note(f"R1 {variant}, titan_rl.launch", job)


@pytest.mark.faults
@pytest.mark.parametrize("first_rank", [0, 1])
def test_killed_while_saving_in_the_background(
    first_rank: int, tmp_path: Path, whole: Callable[[str], runs.Run]
) -> None:
    job = walk(tmp_path, whole, "async", walks.plan(CHECKPOINTS, first_rank=first_rank))
    walks.note(f"C1 asynchronous, first on rank {first_rank}", job)


@pytest.mark.faults
def test_resumed_from_every_step_twice_in_a_row_and_across_the_end_of_an_epoch(
    tmp_path: Path, whole: Callable[[str], runs.Run]
) -> None:
    job = walk(tmp_path, whole, "every step", walks.plan(EVERY_STEP, first_rank=0))
    prompts = [name for entry in journal.read(job.run.folder) for _, name in entry.prompts]
    assert len(set(prompts[:23])) == 23
    assert set(prompts[23:]) < set(prompts[:23])
    walks.note("D2", job)


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["exit1", "raise"])
def test_a_rank_that_ends_by_itself(mode: str, tmp_path: Path, whole: Callable[[str], runs.Run]) -> None:
    points = [("rollout.begin", 3), ("reward.mid", 3), ("forward_backward.0", 3), ("sync.end", 3)]
    job = walk(tmp_path, whole, "grpo", walks.plan(points, first_rank=1, mode=mode))
    walks.note(f"R2 {mode}", job)


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["exit1", "raise"])
def test_without_a_restart_left_the_rank_that_failed_is_what_is_named(mode: str, tmp_path: Path) -> None:
    fault = faults.Fault("forward_backward.0", 3, 1, 0, mode)
    job = walks.start(tmp_path / "run", planted=[fault], max_restarts=0)
    walks.finish(job, code=1)
    output, status = job.run.output(), job.run.status
    root = output.rpartition("Root Cause (first observed failure):")[2]
    assert "rank      : 1 (local_rank: 1)" in root
    assert "exitcode  : 1 " in root
    assert status["outcome"] == "failed"
    if mode == "raise":
        cause = "[rank 1] RuntimeError: planted raise at forward_backward.0, step 3, attempt 0"
        assert status["cause"] == cause
        assert output.count(f"{cause}\n") == 1


@pytest.mark.faults
@pytest.mark.parametrize("variant", ["grpo", "ppo", "vllm"])
def test_the_same_configuration_twice_is_the_same_run(
    variant: str, tmp_path: Path, whole: Callable[[str], runs.Run]
) -> None:
    if variant == "vllm":
        pytest.importorskip("vllm")
    again = jobs.start(tmp_path / "run", *walks.SETTINGS, *VARIANTS[variant], ranks=2).succeed()
    assert journal.read(again.folder) == journal.read(whole(variant).folder)
    assert len(journal.read(again.folder)) == walks.STEPS


def test_the_journal_of_another_run_is_another(tmp_path: Path, whole: Callable[[str], runs.Run]) -> None:
    """What the tests above compare can differ: another seed, and weights that differ in nothing else."""
    other = jobs.start(tmp_path / "seed", *walks.SETTINGS, "debug.seed", 1, ranks=2)
    slower = jobs.start(tmp_path / "lr", *walks.SETTINGS, "optimizer.lr", 2e-4, ranks=2)
    expected = journal.read(whole("grpo").folder)
    assert journal.read(other.succeed().folder)[0].prompts != expected[0].prompts
    first = journal.read(slower.succeed().folder)[0]
    assert (first.rollouts, first.grad_norms) == (expected[0].rollouts, expected[0].grad_norms)
    assert first.parameters != expected[0].parameters
