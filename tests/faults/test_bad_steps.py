"""N1: what is not finite, or a spike, changes no weight, on all ranks alike, and reaches no checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.faults import jobs
from tests.integration import runs

pytestmark = pytest.mark.slow

ALL_ROWS = ("batching.skip_zero_advantages", "false")  # every rank trains in every step
EVERY_STEP = ("checkpoint.interval", 1, "checkpoint.keep_latest_k", 20)


def evidence(run: runs.Run) -> list[str]:
    return sorted(path.name for path in (run.folder / "bad_steps").glob("*"))


def check_weights(run: runs.Run) -> None:
    weights = load_file(run.folder / "export" / "model.safetensors")
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())


def test_steps_that_are_bad_on_one_rank_are_skipped_by_both(tmp_path: Path) -> None:
    settings = (*ALL_ROWS, *EVERY_STEP, "training.steps", 13)
    run = jobs.start(tmp_path / "run", *settings, ranks=2, point="bad_steps", rank=1).succeed()
    text = run.output()
    for step, norm in ((2, "nan"), (4, "nan"), (6, "nan"), (8, "inf")):
        # inf - inf in the norm's reduction or in the loss may be NaN: neither is finite.
        found = [f"Step {step} is skipped: the gradient norm is {kind}." for kind in {norm, "nan"}]
        assert sum(map(text.count, found)) == 2, (step, text[-3000:])
    assert text.count("Step 12 is skipped: the gradient norm is ") == 2
    assert text.count("more than 1000 (resilience.spike_factor) times ") >= 2
    metrics = run.metrics()
    assert [metrics["skipped_steps"][step] for step in (1, 2, 4, 6, 8, 11, 12, 13)] == [
        0,
        1,
        2,
        3,
        4,
        4,
        5,
        5,
    ]
    assert metrics["policy_version"][13] == 8
    assert jobs.complete_steps(run) == list(range(1, 14))
    check_weights(run)
    names = evidence(run)
    assert len(names) >= 5
    # Where the micro-batch itself was spoilt, it is the one of that rank that is kept.
    assert [name for name in names if "step-000004" in name] == ["step-000004.rank-1.safetensors"]
    kept = load_file(run.folder / "bad_steps" / "step-000004.rank-1.safetensors")
    assert bool(torch.isnan(kept["advantages"]).all())
    assert {"input_ids", "loss_mask", "generator_logprobs", "sample_index"} <= set(kept)
    with safe_open(run.folder / "bad_steps" / "step-000004.rank-1.safetensors", "pt") as file:
        facts = file.metadata()
    assert facts["step"] == "4"
    assert facts["cause"] == "the gradient norm is nan"


def test_too_many_bad_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    settings = (*ALL_ROWS, *EVERY_STEP, "training.steps", 20)
    run = jobs.start(tmp_path / "run", *settings, ranks=2, point="bad_from", step=3, rank=0)
    assert run.wait(120) == [1, 1], run.tail()
    assert "4 steps in a row were skipped, more than resilience.max_skipped_steps" in run.status["cause"]
    assert jobs.complete_steps(run) == [1, 2, 3, 4, 5]
    # The same command goes on from there: what was skipped did not spoil it.
    again = jobs.start(tmp_path / "run", *settings, "training.steps", 7, ranks=2).succeed()
    check_weights(again)


def test_a_bad_step_ends_the_run_where_that_is_asked_for(tmp_path: Path) -> None:
    settings = (*ALL_ROWS, *EVERY_STEP, "resilience.bad_step", "abort")
    run = jobs.start(tmp_path / "run", *settings, ranks=2, point="bad_once", step=3, rank=1)
    assert run.wait(120) == [1, 1], run.tail()
    assert 'Step 3 ends the run, as resilience.bad_step = "abort" says' in run.status["cause"]
    assert jobs.complete_steps(run) == [1, 2]


def test_a_run_goes_back_to_its_checkpoint_and_on_with_other_prompts(tmp_path: Path) -> None:
    settings = (*ALL_ROWS, "checkpoint.interval", 2, "resilience.bad_step", "roll_back")
    run = jobs.start(tmp_path / "run", *settings, ranks=2, point="bad_once", step=4, rank=1).succeed()
    assert run.output().count("Step 4 was bad: going back to the checkpoint of step 2.") == 2
    assert jobs.complete_steps(run) == [2, 4, 6]
    drawn = {number: sorted({row["prompt_index"] for row in rows}) for number, rows in run.rollouts().items()}
    # Iterations 3 and 4 were sampled twice: what stands there now are the prompts after the bad ones.
    assert drawn == {
        1: [0, 1, 2, 3],
        2: [4, 5, 6, 7],
        3: [16, 17, 18, 19],
        4: [20, 21, 22, 23],
        5: [24, 25, 26, 27],
        6: [28, 29, 30, 31],
    }
    assert run.metrics()["policy_version"][6] == 6
    check_weights(run)


@pytest.mark.parametrize("config", ["sft", "dpo"])
def test_runs_without_rollouts_skip_and_give_up_alike(config: str, tmp_path: Path) -> None:
    """A learning rate that blows the weights up in the first step: from then on no gradient is finite."""
    settings = ("optimizer.lr", 1e30, "training.steps", 30, "checkpoint.interval", 1)
    run = jobs.start(tmp_path / "run", *settings, config=config, ranks=2)
    assert run.wait(120) == [1, 1], run.tail()
    assert "4 steps in a row were skipped" in run.status["cause"]
    assert "Step 5 is skipped: the gradient norm is " in run.output()
    assert len(evidence(run)) >= 3
    # What is not finite itself is not saved either.
    worse = jobs.start(tmp_path / "worse", *settings, "optimizer.lr", 1e39, config=config, ranks=2)
    assert worse.wait(120) == [1, 1], worse.tail()
    assert "The state of step 1 must be finite to be saved" in worse.status["cause"]
    assert jobs.complete_steps(worse) == []


def test_a_supervised_run_goes_back_too(tmp_path: Path) -> None:
    settings = ("optimizer.lr", 1e30, "checkpoint.interval", 1, "resilience.bad_step", "roll_back")
    run = jobs.start(tmp_path / "run", *settings, config="sft", ranks=2)
    assert run.wait(120) == [1, 1], run.tail()
    assert run.output().count("Step 2 was bad: going back to the checkpoint of step 1.") == 2 * 3
    assert jobs.complete_steps(run) == [1]
