"""Several optimiser steps per iteration, and steps that have nothing to train on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration import runs

pytestmark = pytest.mark.slow

TWO_STEPS = ("algorithm.steps_per_iteration", 2, "training.steps", 6, "optimizer.lr", 3e-3)
FROM_GENERATOR = ("algorithm.old_logprobs", "generator")
REWARD = '[{ type = "tests.integration.odd_rewards:NAME" }]'
ALL_FAIL = ("reward", REWARD.replace("NAME", "fails_for_all"), "resilience.max_failed_reward_fraction", 1.0)
RUNS = {
    "recomputed": TWO_STEPS,
    "from_generator": TWO_STEPS + FROM_GENERATOR,
    "mistrusted": (*TWO_STEPS, *FROM_GENERATOR, "algorithm.max_mismatch", 1e-12),
    "equal_rewards": ("reward", REWARD.replace("NAME", "constant"), "training.steps", 2),
    "nothing_to_train": (*ALL_FAIL, "training.steps", 2),
    "nothing_for_too_long": (*ALL_FAIL, "training.steps", 4, "resilience.max_skipped_steps", 1),
}


@pytest.fixture(scope="module")
def started(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    directory = tmp_path_factory.mktemp("steps")

    def start(name: str) -> runs.Run:
        checkpoint = ("checkpoint.initial_load_path", initial_load_path)
        return runs.start(runs.CONFIGS / "grpo.toml", *checkpoint, *RUNS[name], folder=directory / name)

    return runs.all_of({name: lambda name=name: start(name) for name in RUNS})


def test_steps_are_counted_and_rollouts_come_from_the_version_of_their_iteration(
    started: dict[str, runs.Run],
) -> None:
    run = started["recomputed"].succeed()
    assert (run.status["step"], run.summary["policy_version"]) == (6, 6)
    versions = {number: {r["policy_version"] for r in rows} for number, rows in run.rollouts().items()}
    assert versions == {1: {0}, 2: {2}, 3: {4}}
    metrics = run.metrics()
    assert sorted(metrics["grad_norm"]) == [2, 4, 6]  # logged once per iteration
    assert metrics["policy_version"] == {2: 2.0, 4: 4.0, 6: 6.0}


def test_the_second_step_sees_a_ratio_that_is_not_one_and_clips(started: dict[str, runs.Run]) -> None:
    metrics = started["recomputed"].succeed().metrics()
    assert all(value > 1.001 for value in metrics["loss/ratio_max"].values())
    assert all(value > 0 for value in metrics["loss/old_kl"].values())
    clipped = [*metrics["loss/clip_low_fraction"].values(), *metrics["loss/clip_high_fraction"].values()]
    assert 0 < max(clipped) < 0.5


def test_old_logprobs_of_the_generator_train_alike(started: dict[str, runs.Run]) -> None:
    recomputed, taken = started["recomputed"].succeed(), started["from_generator"].succeed()
    assert tokens(taken) == tokens(recomputed)
    for name in ("grad_norm", "loss/loss", "loss/ratio_max", "loss/old_kl"):
        assert taken.metrics()[name] == pytest.approx(recomputed.metrics()[name], rel=1e-3, abs=1e-5)
    assert taken.metrics()["loss/ratio"] != recomputed.metrics()["loss/ratio"]  # not the same numbers


def test_the_mismatch_is_measured_also_when_the_generator_is_trusted(started: dict[str, runs.Run]) -> None:
    metrics = started["from_generator"].succeed().metrics()
    assert all(0 < value < 5e-5 for value in metrics["loss/mismatch_abs"].values())


def test_a_generator_that_differs_too_much_is_not_trusted_and_a_warning_says_so(
    started: dict[str, runs.Run],
) -> None:
    mistrusted = started["mistrusted"].succeed()
    warnings = re.findall(r"Generator and trainer differ by (\S+) nats per token", mistrusted.output())
    assert len(warnings) == 2  # before the first iteration nothing is known, so nothing is warned of
    assert all(0 < float(value) < 5e-5 for value in warnings)
    assert "are recomputed in this iteration" in mistrusted.output()
    assert "Generator and trainer differ" not in started["from_generator"].output()
    # Then it does what recomputing does, bit for bit.
    recomputed = started["recomputed"].succeed()
    assert weights(mistrusted) == weights(recomputed)
    assert weights(mistrusted) != weights(started["from_generator"])


def test_equal_rewards_train_on_the_reference_kl_alone(started: dict[str, runs.Run]) -> None:
    run = started["equal_rewards"].succeed()
    metrics = run.metrics()
    assert (run.summary["policy_version"], metrics["skipped_steps"]) == (2, {1: 0.0, 2: 0.0})
    assert metrics["reward/equal_groups_fraction"] == {1: 1.0, 2: 1.0}
    assert metrics["loss/advantage_abs_max"] == {1: 0.0, 2: 0.0}
    assert metrics["loss/reference_kl"][1] == pytest.approx(0, abs=1e-6)


def test_a_step_without_a_token_is_skipped_and_counted(
    started: dict[str, runs.Run], pretrained: runs.Run
) -> None:
    run = started["nothing_to_train"].succeed()
    assert (run.status["step"], run.summary["policy_version"]) == (2, 0)
    metrics = run.metrics()
    assert metrics["skipped_steps"] == {1: 1.0, 2: 2.0}
    assert metrics["reward/failed_fraction"] == {1: 1.0, 2: 1.0}
    assert metrics["throughput/trained_tokens"] == {1: 0.0, 2: 0.0}
    assert run.output().count("is skipped: no token to train on in any rank") == 2
    # The cursor moved, the weights did not: the second iteration has other prompts and the same version.
    first, second = run.rollouts().values()
    assert {r["prompt_index"] for r in first + second} == set(range(16))
    assert {r["policy_version"] for r in first + second} == {0}
    assert weights(run) == weights(pretrained)


def test_too_many_skipped_steps_in_a_row_end_the_run(started: dict[str, runs.Run]) -> None:
    run = started["nothing_for_too_long"]
    assert run.wait() == [1], run.tail()
    assert (run.status["outcome"], run.status["step"]) == ("failed", 2)
    assert "2 steps in a row were skipped, more than resilience.max_skipped_steps" in run.status["cause"]


def tokens(run: runs.Run) -> list[list[int]]:
    return [r["completion_token_ids"] for rows in run.rollouts().values() for r in rows]


def weights(run: runs.Run) -> bytes:
    return (run.folder / "export" / "model.safetensors").read_bytes()
