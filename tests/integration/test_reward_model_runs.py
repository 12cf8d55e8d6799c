"""Reward models as a user trains them: learning, resume, two ranks, the export, and what they reward in RL.

Rewards are compared with those that transformers gives on the export, within 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.integration import pair_runs, runs
from titan_rl.data.chat import PromptEncoder
from titan_rl.types import Message

pytestmark = pytest.mark.slow

CONFIG = runs.CONFIGS / "reward_model.toml"
TOLERANCE = 1e-4  # units of reward
REWARDED = ("training.steps", 2, "data.prompts_per_iteration", 4, "model.export", "false")


@pytest.fixture(scope="module")
def started(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    """Runs on pairs, and then RL runs with the reward model that the first of them left."""
    directory = tmp_path_factory.mktemp("reward_model")
    found = pair_runs.start_all(CONFIG, initial_load_path, directory)
    left = found["whole"].folder
    export, checkpoint = left / "export", left / "checkpoint" / f"step-{pair_runs.STEPS}"
    wanted: dict[str, tuple[object, ...]] = {
        "alone": ("reward_model.path", export, "reward_model.is_alone", "true"),
        # Every sibling is the greedy completion, or nearly.
        "weighted": (
            "reward_model.path", checkpoint,
            "reward_model.weight", 0.5,
            "algorithm.type", "remax",
            "sampling.temperature", 0.01,
        ),
        "only": ("reward_model.path", export, "reward", "[]"),
    }  # fmt: skip
    load = ("checkpoint.initial_load_path", initial_load_path)
    found |= runs.all_of(
        {
            name: lambda name=name, more=more: runs.start(
                runs.CONFIGS / "grpo.toml", *REWARDED, *load, *more, folder=directory / name
            )
            for name, more in wanted.items()
        }
    )
    return {name: run.succeed() for name, run in found.items()}


Reward = Callable[[Sequence[int]], float]


@pytest.fixture(scope="module")
def in_transformers(started: dict[str, runs.Run]) -> Reward:
    """Prompt and completion tokens to the reward that transformers gives with the exported model."""
    folder = started["whole"].folder / "export"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.config.num_labels == 1

    def reward(token_ids: Sequence[int]) -> float:
        with torch.no_grad():
            (value,) = model(torch.tensor([list(token_ids)])).logits[0].tolist()
        return value

    return reward


# ------------------------------------------------------------------------------------------------ pairs


def test_it_learns_beyond_noise_and_says_so(started):
    pair_runs.assert_learned(started["whole"])


def test_the_export_gives_the_evaluated_rewards_in_transformers(started, in_transformers):
    found: dict[str, list[float]] = {"chosen": [], "rejected": []}
    for side, ids, _ in pair_runs.held_out(CONFIG):
        found[side].append(in_transformers(ids))
    last = pair_runs.evaluations(started["whole"])[pair_runs.STEPS]
    for side, values in found.items():
        assert last[f"{side}_reward"] == pytest.approx(fmean(values), abs=TOLERANCE)
    margins = [c - r for c, r in zip(found["chosen"], found["rejected"], strict=True)]
    assert last["accuracy"] == pytest.approx(fmean(margin > 0 for margin in margins))
    assert last["margin"] == pytest.approx(fmean(margins), abs=TOLERANCE)
    assert last["margin_std"] == pytest.approx(pstdev(margins), abs=TOLERANCE)


def test_a_resumed_run_ends_bit_for_bit_like_the_uninterrupted_one(started):
    assert "/checkpoint/step-4." in started["resumed"].output()
    pair_runs.assert_same_end(started["resumed"], started["whole"])


def test_two_ranks_end_where_one_does(started):
    pair_runs.assert_close_end(started["whole"], started["two_ranks"])


# ------------------------------------------------------------------------------------ rewards from a model


def trained_on(run: runs.Run) -> list[dict[str, Any]]:
    """Every recorded rollout of both iterations."""
    return [row for rows in run.rollouts().values() for row in rows]


def learned(row: dict[str, Any], reward: Reward) -> float:
    """What transformers gives to a recorded rollout."""
    encoder = PromptEncoder(str(pair_runs.TINY), system_prompt=None, max_prompt_tokens=64)
    prompt = encoder.encode([Message(**message) for message in row["messages"]])
    assert len(prompt) == row["num_prompt_tokens"]
    return reward([*prompt, *row["completion_token_ids"]])


@pytest.mark.parametrize("name", ["alone", "weighted", "only"])
def test_every_rollout_has_the_model_s_reward(started, in_transformers, name):
    rows = trained_on(started[name])
    assert len(rows) == 2 * 4 * 8
    for row in rows[::5]:
        expected = learned(row, in_transformers)
        assert row["reward_parts"]["reward_model"] == pytest.approx(expected, abs=TOLERANCE)
    assert len({round(row["reward_parts"]["reward_model"], 4) for row in rows}) > 4


def test_the_total_is_the_model_s_reward_alone_or_a_weighted_sum(started):
    for row in trained_on(started["alone"]) + trained_on(started["only"]):
        assert row["reward"] == row["reward_parts"]["reward_model"]
    assert {row["reward_parts"]["format"] for row in trained_on(started["alone"])} == {0.0, 1.0}
    for row in trained_on(started["weighted"]):
        parts = row["reward_parts"]
        assert row["reward"] == pytest.approx(0.5 * parts["reward_model"] + parts["format"])


def test_the_greedy_baseline_is_scored_by_the_model_too(started):
    """Its reward is that of the siblings that are the same completion."""
    rows = trained_on(started["weighted"])
    same = [
        row
        for row in rows
        if abs(row["advantage"]) < 1e-5 and abs(row["reward_parts"]["reward_model"]) > 0.01
    ]
    assert len(same) > len(rows) / 2


def test_held_out_prompts_are_scored_by_the_tables_and_without_any_by_the_model(started, in_transformers):
    for row in started["alone"].rollouts("evaluation")[2]:
        assert row["reward_parts"].keys() == {"format", "exact_match"}
        assert row["reward"] == row["reward_parts"]["format"]
    for row in started["only"].rollouts("evaluation")[2]:
        assert row["reward"] == pytest.approx(learned(row, in_transformers), abs=TOLERANCE)


def test_the_mean_of_the_model_s_rewards_is_logged(started):
    for name in ("alone", "weighted", "only"):
        run = started[name]
        expected = {
            iteration: fmean(row["reward_parts"]["reward_model"] for row in rows)
            for iteration, rows in run.rollouts().items()
        }
        assert run.metrics()["reward_part/reward_model"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
