"""Runs of every named algorithm, of rewards that teach nothing, and PPO with an adaptive penalty resumed."""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.integration import runs
from titan_rl.algorithms.registries import ALGORITHMS

pytestmark = pytest.mark.slow

GRADED, ODD, CONSTANT = (
    f'[{{ type = "tests.integration.{name}" }}]'
    for name in ("algorithm_rewards:graded", "algorithm_rewards:odd", "odd_rewards:constant")
)
SMALL = (
    "training.steps",
    2,
    "data.prompts_per_iteration",
    4,
    "evaluation.num_prompts",
    2,
    "model.export",
    "false",
)
ALL_MAY_FAIL = ("resilience.max_failed_reward_fraction", 1.0)
NOTHING_TRAINED = ("sampling.max_tokens", 1, "shaping.mask_truncated", "true")
ADAPTIVE = (
    "algorithm.type", "ppo",
    "training.steps", 4,
    "data.prompts_per_iteration", 4,
    "evaluation.num_prompts", 2,
    "checkpoint.interval", 2,
    "critic.optimizer.lr", 1e-3,
    "critic.warmup_iterations", 1,
    "critic.normalise_values", "true",
    "loss.kl.target", 0.001,
    "loss.kl.horizon_samples", 100,
)  # fmt: skip
OWN = {  # factors of the classes of own_parts.py, all different
    "advantage": ("Advantage", 2.0),
    "loss.ratio": ("DoubledRatio", 3.0),
    "loss.surrogate": ("Surrogate", 0.5),
    "loss.correction": ("Correction", 0.75),
    "loss.rejection": ("Rejection", 0.5),
    "loss.aggregation": ("Aggregation", 0.125),
    "loss.kl": ("Penalty", 0.3125),
}
WITH_CRITIC = ("ppo", "dual_clip_ppo")
WHITENED = ("ppo", "dual_clip_ppo", "reinforce_pp", "reinforce_pp_baseline")


@pytest.fixture(scope="module")
def started(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    """Runs by name; those of an algorithm by its name."""
    directory = tmp_path_factory.mktemp("algorithms")

    def start(name: str, *overrides: object) -> runs.Run:
        if "teacher.initial_load_path" not in overrides:
            overrides += ("checkpoint.initial_load_path", initial_load_path)
        config = runs.CONFIGS / "grpo.toml"
        return runs.start(config, *overrides, folder=directory / name.replace("/", "_"))

    wanted: dict[str, tuple[object, ...]] = {
        name: (*SMALL, "algorithm.type", name, "reward", GRADED) for name in ALGORITHMS
    }
    wanted["dapo"] = (*SMALL, "algorithm.type", "dapo")  # with rewards that may be equal
    # A student of random weights, which differs from its teacher.
    wanted["on_policy_distillation"] += (
        "teacher.initial_load_path", initial_load_path,
        "checkpoint.initial_load_path", "none",
        "model.allow_random_init", "true",
    )  # fmt: skip
    for name in ("ppo", "remax", "gspo"):
        wanted[f"equal/{name}"] = (*SMALL, "algorithm.type", name, "reward", CONSTANT)
    for name in ("ppo", "reinforce_pp_baseline"):
        wanted[f"odd/{name}"] = (*SMALL, *ALL_MAY_FAIL, "algorithm.type", name, "reward", ODD)
    wanted["nothing/ppo"] = (*SMALL, *NOTHING_TRAINED, "algorithm.type", "ppo", "reward", GRADED)
    wanted["budget/dapo"] = (
        *SMALL, "algorithm.type", "dapo", "reward", CONSTANT, "refill.max_rounds", 2,
    )  # fmt: skip
    wanted["adaptive"] = ADAPTIVE
    wanted["own"] = (*SMALL, "reward", GRADED, "loss.kl.coefficient", 0.25)
    for table, (name, factor) in OWN.items():
        wanted["own"] += (f"{table}.type", f"tests.integration.own_parts:{name}", f"{table}.factor", factor)
    found = runs.all_of(
        {name: lambda name=name, more=more: start(name, *more) for name, more in wanted.items()}
    )
    # The same command where the checkpoint of the second of four steps is the newest.
    shutil.copytree(directory / "adaptive", directory / "resumed")
    shutil.rmtree(directory / "resumed" / "checkpoint" / "step-4")
    shutil.rmtree(directory / "resumed" / "tb")
    found["resumed"] = start("resumed", *ADAPTIVE)
    found["resumed"].wait()
    return found


def by_group(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    groups = defaultdict(list)
    for row in rows:
        groups[row["prompt_index"]].append(row)
    return dict(groups)


def finite(values: dict[int, float]) -> bool:
    return len(values) == 2 and all(map(math.isfinite, values.values()))


# ------------------------------------------------------------------------------------- every algorithm runs


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_runs_to_its_end_with_finite_numbers(started: dict[str, runs.Run], name: str) -> None:
    run = started[name].succeed()
    assert (run.status["outcome"], run.status["step"], run.summary["policy_version"]) == ("done", 2, 2)
    metrics = run.metrics()
    for metric in ("loss/loss", "loss/policy_loss", "grad_norm", "loss/ratio", "loss/entropy", "reward/mean"):
        assert finite(metrics[metric]), metric
    assert all(value > 0 for value in metrics["grad_norm"].values())
    assert metrics["skipped_steps"] == {1: 0.0, 2: 0.0}
    assert finite(metrics["loss/reference_kl"])
    assert metrics["loss/reference_kl"][2] > 0  # the first step has moved the policy
    assert len([row for row in run.rollouts()[1] if row["advantage"] is not None]) == 4 * 8


@pytest.mark.parametrize("name", WITH_CRITIC)
def test_the_critic_is_trained_and_measured(started: dict[str, runs.Run], name: str) -> None:
    metrics = started[name].succeed().metrics()
    for metric in ("critic/loss", "critic/grad_norm", "critic/value", "critic/return"):
        assert finite(metrics[metric]), metric
    assert metrics["critic/skipped_steps"] == {1: 0.0, 2: 0.0}
    assert metrics["critic/value"][1] == 0.0  # a head that starts at zero
    assert metrics["critic/value"][2] != 0.0
    assert ("loss/clip_dual_fraction" in metrics) == (name == "dual_clip_ppo")
    assert "critic/loss" not in started["grpo"].metrics()


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "sapo", "gmpo"])
def test_group_normalised_advantages_are_those_of_the_recorded_rewards(
    started: dict[str, runs.Run], name: str
) -> None:
    trained = [row for row in started[name].succeed().rollouts()[1] if row["advantage"] is not None]
    assert len(trained) == 4 * 8
    for rows in by_group(trained).values():
        rewards = [row["reward"] for row in rows]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        expected = [(r - mean) / (std + 1e-6) for r in rewards]
        assert [row["advantage"] for row in rows] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("name", "scale"), [("dr_grpo", 1.0), ("rloo", 8 / 7)])
def test_centred_advantages_are_those_of_the_recorded_rewards(
    started: dict[str, runs.Run], name: str, scale: float
) -> None:
    """The reference is the policy in the first iteration, so that a penalty in the reward is 0."""
    for rows in by_group(started[name].succeed().rollouts()[1]).values():
        mean = sum(row["reward"] for row in rows) / len(rows)
        expected = [scale * (row["reward"] - mean) for row in rows]
        assert [row["advantage"] for row in rows] == pytest.approx(expected, abs=1e-4)


def test_the_baseline_of_remax_is_one_reward_for_the_whole_group(started: dict[str, runs.Run]) -> None:
    baselines = []
    for rows in by_group(started["remax"].succeed().rollouts()[1]).values():
        differences = [row["reward"] - row["advantage"] for row in rows]
        assert differences == pytest.approx([differences[0]] * len(rows), abs=1e-4)
        baselines.append(round(differences[0], 3))
    assert set(baselines) <= {0.0, 1.0}  # what a greedy rollout, of sample index 0, can earn


@pytest.mark.parametrize("name", WHITENED)
def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_tokens(
    started: dict[str, runs.Run], name: str
) -> None:
    rows = started[name].succeed().rollouts()[1]
    weights = [len(row["completion_token_ids"]) for row in rows]
    total = sum(weights)
    mean = sum(w * row["advantage"] for w, row in zip(weights, rows, strict=True)) / total
    square = sum(w * row["advantage"] ** 2 for w, row in zip(weights, rows, strict=True)) / total
    assert mean == pytest.approx(0, abs=1e-4)
    # Without a penalty yet, and with values of 0, all tokens of a rollout have one advantage.
    assert square == pytest.approx((total - 1) / total, abs=1e-3)


def test_distillation_measures_the_distance_to_the_teacher(started: dict[str, runs.Run]) -> None:
    metrics = started["on_policy_distillation"].succeed().metrics()
    assert all(value > 0.1 for value in metrics["loss/teacher_kl"].values())
    assert metrics["loss/advantage_abs_max"] == {1: 0.0, 2: 0.0}


def test_a_full_batch_of_groups_with_a_signal_is_trained_on(started: dict[str, runs.Run]) -> None:
    run = started["dapo"].succeed()
    metrics = run.metrics()
    for number, rows in run.rollouts().items():
        trained = by_group([row for row in rows if row["advantage"] is not None])
        assert len(trained) == 4
        assert all(len({row["reward"] for row in group}) > 1 for group in trained.values())
        assert metrics["rollout/dropped_groups"][number] == len(by_group(rows)) - 4
        assert 1 <= metrics["rollout/rounds"][number] <= 11


def test_a_class_of_one_s_own_is_used_in_every_place_of_a_composition(started: dict[str, runs.Run]) -> None:
    run = started["own"].succeed()
    metrics, rows = run.metrics(), run.rollouts()[1]
    factor = {table: number for table, (_, number) in OWN.items()}
    lengths = [len(row["completion_token_ids"]) for row in rows]
    advantages = [factor["advantage"] * row["reward"] for row in rows]
    assert [row["advantage"] for row in rows] == pytest.approx(advantages, abs=1e-5)
    kept = [n if a >= factor["loss.rejection"] else 0 for n, a in zip(lengths, advantages, strict=True)]
    assert 0 < sum(kept) < sum(lengths)
    token = -factor["loss.surrogate"] * factor["loss.ratio"] * factor["loss.correction"]
    share = factor["loss.aggregation"] / len(rows)
    policy_loss = share * token * sum(n * a for n, a in zip(kept, advantages, strict=True))
    penalty = share * factor["loss.kl"] * sum(lengths)  # policy and reference are still equal
    expected = {
        "loss/policy_loss": policy_loss,
        "loss/loss": policy_loss + 0.25 * penalty,
        "loss/kl_coefficient": 0.25,
        "loss/ratio": factor["loss.ratio"],
        "loss/clip_low_fraction": 1.0,
        "loss/correction_weight": factor["loss.correction"] * sum(kept) / sum(lengths),
        "loss/correction_rejected_fraction": 1 - sum(kept) / sum(lengths),
    }
    assert {name: metrics[name][1] for name in expected} == pytest.approx(expected, rel=1e-4)


@pytest.mark.nightly
def test_a_whole_loss_of_one_s_own_is_trained_with(initial_load_path: Path, tmp_path: Path) -> None:
    run = runs.start(
        runs.CONFIGS / "grpo.toml",
        *SMALL,
        *("checkpoint.initial_load_path", initial_load_path, "reward", GRADED, "loss.kl.coefficient", 0.25),
        *("loss.type", "tests.integration.own_parts:WholeLoss", "loss.factor", 0.5),
        folder=tmp_path,
    ).succeed()
    metrics, rows = run.metrics(), run.rollouts()[1]
    lengths = [len(row["completion_token_ids"]) for row in rows]
    advantages = [row["advantage"] for row in rows]
    expected = -0.5 * sum(n * a for n, a in zip(lengths, advantages, strict=True)) / sum(lengths)
    assert metrics["loss/policy_loss"][1] == pytest.approx(expected, rel=1e-4)
    assert metrics["loss/own_max"][1] == pytest.approx(max(advantages), rel=1e-4)
    assert metrics["loss/kl_coefficient"] == {1: 0.25, 2: 0.25}
    assert "loss/ratio" not in metrics
    assert metrics["grad_norm"][1] > 0


# --------------------------------------------------------------------------------- rewards that teach nothing


@pytest.mark.parametrize("name", ["equal/ppo", "equal/remax", "equal/gspo"])
def test_equal_rewards_are_finite_and_counted(started: dict[str, runs.Run], name: str) -> None:
    metrics = started[name].succeed().metrics()
    assert finite(metrics["loss/loss"])
    assert metrics["reward/equal_groups_fraction"] == {1: 1.0, 2: 1.0}
    assert metrics["loss/advantage_abs_max"][1] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("name", ["odd/ppo", "odd/reinforce_pp_baseline"])
def test_rewards_that_are_not_numbers_are_counted_and_never_trained_on(
    started: dict[str, runs.Run], name: str
) -> None:
    run = started[name].succeed()
    metrics = run.metrics()
    assert finite(metrics["loss/loss"])
    assert all(0.1 < value < 1 for value in metrics["reward/failed_fraction"].values())
    for number, rows in run.rollouts().items():
        failed = [row for row in rows if row["reward"] is None]
        assert len(failed) / len(rows) == pytest.approx(metrics["reward/failed_fraction"][number])
        assert all(row["advantage"] is None and "nan" in row["reward_error"].lower() for row in failed)


def test_iterations_without_a_trained_token_are_skipped_and_counted(started: dict[str, runs.Run]) -> None:
    run = started["nothing/ppo"].succeed()
    assert (run.status["step"], run.summary["policy_version"]) == (2, 0)
    metrics = run.metrics()
    assert metrics["skipped_steps"] == {1: 1.0, 2: 2.0}
    assert metrics["throughput/trained_tokens"] == {1: 0.0, 2: 0.0}
    assert metrics["rollout/truncated_fraction"] == {1: 1.0, 2: 1.0}
    assert "critic/loss" not in metrics


def test_a_run_that_cannot_fill_its_batch_ends_and_names_the_budget(started: dict[str, runs.Run]) -> None:
    run = started["budget/dapo"]
    assert run.wait() == [1], run.tail()
    assert run.status["outcome"] == "failed"
    assert "4 of 4 groups are missing after refill.max_rounds = 2" in run.status["cause"]


# ------------------------------------------------------------------------- PPO, adaptive penalty, resumption


def test_the_controller_changes_the_coefficient_by_what_was_measured(started: dict[str, runs.Run]) -> None:
    metrics = started["adaptive"].succeed().metrics()
    coefficient = 0.01  # of the recipe
    for step in range(1, 5):
        assert metrics["reward/kl_coefficient"][step] == pytest.approx(coefficient, rel=1e-5)
        error = min(max(metrics["reward/kl_mean"][step] / 0.001 - 1, -0.2), 0.2)
        coefficient *= 1 + error * 32 / 100
    assert len(set(metrics["reward/kl_coefficient"].values())) == 4


def test_the_policy_waits_for_the_critic_to_warm_up(started: dict[str, runs.Run]) -> None:
    run = started["adaptive"].succeed()
    assert (run.status["step"], run.summary["policy_version"]) == (4, 3)
    metrics = run.metrics()
    assert sorted(metrics["critic/loss"]) == [1, 2, 3, 4]
    assert sorted(metrics["grad_norm"]) == [2, 3, 4]


def test_a_resumed_run_ends_bit_for_bit_where_the_uninterrupted_one_does(
    started: dict[str, runs.Run],
) -> None:
    whole, resumed = started["adaptive"].succeed(), started["resumed"].succeed()
    assert "checkpoint/step-2." in resumed.output()
    again = resumed.metrics()
    for name in (
        "reward/kl_coefficient", "reward/kl_mean", "critic/loss", "critic/value", "critic/return",
        "critic/grad_norm", "grad_norm", "loss/loss", "reward/mean",
    ):  # fmt: skip
        assert again[name] == {step: whole.metrics()[name][step] for step in (3, 4)}, name
    assert resumed.rollouts() == whole.rollouts()
    exported = [(run.folder / "export" / "model.safetensors").read_bytes() for run in (whole, resumed)]
    assert exported[0] == exported[1]
