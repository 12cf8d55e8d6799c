"""Rewards that raise or hang: dropped and counted, or the end of the run when there are too many."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.integration import runs

pytestmark = pytest.mark.slow

GROUP_SIZE = 8


@pytest.fixture(scope="module")
def started(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    directory = tmp_path_factory.mktemp("rewards")

    def start(reward: str, *overrides: object) -> runs.Run:
        return runs.start(
            runs.CONFIGS / "grpo.toml",
            "checkpoint.initial_load_path", initial_load_path,
            "reward", f'[{{ type = "tests.integration.odd_rewards:{reward}" }}]',
            "training.steps", 2,
            *overrides,
            folder=directory / reward,
        )  # fmt: skip

    return runs.all_of(
        {
            "some": lambda: start("fails_for_some", "reward_workers.deadline_seconds", 2.5),
            "most": lambda: start("fails_for_most"),
        }
    )


def is_bad(rollout: dict[str, Any]) -> bool:
    return rollout["prompt_id"].startswith("arithmetic/add/5/")


def hangs(rollout: dict[str, Any]) -> bool:
    return rollout["prompt_id"].startswith("arithmetic/add/6/") and rollout["sample_index"] == 3


def test_failed_rewards_are_dropped_with_their_cause_and_the_run_goes_on(
    started: dict[str, runs.Run],
) -> None:
    run = started["some"].succeed()
    assert (run.status["outcome"], run.status["step"]) == ("done", 2)
    rollouts = run.rollouts()
    assert sorted(rollouts) == [1, 2]
    everything = [r for iteration in rollouts.values() for r in iteration]
    assert any(map(is_bad, everything))
    assert any(map(hangs, everything))
    for rollout in everything:
        failed = is_bad(rollout) or hangs(rollout)
        assert (rollout["reward"] is None) == (rollout["advantage"] is None) == failed
        if is_bad(rollout):
            assert rollout["reward_error"].startswith("raised: ")
            assert f"no reward for {rollout['prompt_id']}" in rollout["reward_error"]
        elif failed:
            assert rollout["reward_error"].startswith("timeout: ")
        else:
            assert rollout["reward_error"] is None
    assert "rewards failed on this rank" in run.output()


def test_failures_are_counted_and_their_tokens_are_not_trained(started: dict[str, runs.Run]) -> None:
    run = started["some"].succeed()
    metrics = run.metrics()
    for number, rollouts in run.rollouts().items():
        failed = [r for r in rollouts if r["reward"] is None]
        assert metrics["reward/failed_fraction"][number] == pytest.approx(len(failed) / len(rollouts))
        scored = [r for r in rollouts if r["reward"] is not None]
        assert metrics["reward/mean"][number] == pytest.approx(statistics.mean(r["reward"] for r in scored))
        trained = sum(len(r["completion_token_ids"]) for r in scored)
        assert metrics["throughput/trained_tokens"][number] == trained
    failed_evaluation = [r for r in run.rollouts("evaluation")[2] if r["reward"] is None]
    assert metrics["evaluation/failed_rewards"][2] == len(failed_evaluation) > 0


def test_siblings_of_a_dropped_sample_are_compared_among_themselves(started: dict[str, runs.Run]) -> None:
    groups: dict[int, list[dict[str, Any]]] = {}
    for iteration in started["some"].succeed().rollouts().values():
        for rollout in iteration:
            groups.setdefault(rollout["prompt_index"], []).append(rollout)
    with_hole = [group for group in groups.values() if any(map(hangs, group)) and not is_bad(group[0])]
    assert with_hole
    has_spread = False
    for group in with_hole:
        scored = [r for r in group if r["reward"] is not None]
        assert (len(group), len(scored)) == (GROUP_SIZE, GROUP_SIZE - 1)
        rewards = [r["reward"] for r in scored]
        mean, std = statistics.mean(rewards), statistics.stdev(rewards)
        has_spread |= std > 0
        for rollout in scored:
            expected = (rollout["reward"] - mean) / (std + 1e-6)
            assert rollout["advantage"] == pytest.approx(expected, abs=1e-5)
    assert has_spread


def test_above_the_fraction_the_run_ends_with_the_cause_and_trains_nothing(
    started: dict[str, runs.Run],
) -> None:
    run = started["most"]
    assert run.wait() == [1], run.tail()
    assert (run.status["outcome"], run.status["step"]) == ("failed", 0)
    cause = run.status["cause"]
    assert "of 64 rewards failed, more than resilience.max_failed_reward_fraction" in cause
    assert "raised: " in cause
    assert "no reward for arithmetic/add/" in cause
    assert cause in run.output()
    assert list(run.rollouts()) == [1]  # to be looked at
    assert {row["advantage"] for row in run.rollouts()[1]} == {None}
    assert any(row["reward_error"] for row in run.rollouts()[1])
