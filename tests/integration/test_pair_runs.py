"""Reward models and DPO as a user starts them, and RL whose reward is what a reward model learned.

Rewards are compared with those that transformers gives on the export, within 1e-4.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.integration import runs
from titan_rl.data.arithmetic_preferences import ArithmeticPreferences
from titan_rl.data.chat import PromptEncoder
from titan_rl.data.preferences import encode, preference_of
from titan_rl.types import Message

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
TINY = runs.ROOT / "titan_rl" / "assets" / "tiny_llama"
RECIPES = runs.ROOT / "train_configs"
SUMS = {"minimum": 5, "maximum": 9, "num_held_out": 8, "template": "{a}+{b}="}
PAIRS = (
    *(part for key, value in SUMS.items() for part in (f"data.source.{key}", value)),
    "data.preferences_per_step", 8,
    "training.steps", 4,
    "training.seq_len", 64,
    "optimizer.lr", 1e-3,
    "checkpoint.interval", 2,
    "evaluation.minimum_gain", "none",
)  # fmt: skip
REWARDED = ("training.steps", 2, "data.prompts_per_iteration", 4, "model.export", "false")


@pytest.fixture(scope="module")
def started(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    """Runs on pairs, and then RL runs with the reward model that one of them left."""
    directory = tmp_path_factory.mktemp("pairs")

    def pairs(name: str, recipe: str, *more: object) -> runs.Run:
        load = ("checkpoint.initial_load_path", initial_load_path)
        return runs.start(RECIPES / f"{recipe}.toml", *PAIRS, *load, *more, folder=directory / name)

    def rl(name: str, *more: object) -> runs.Run:
        load = ("checkpoint.initial_load_path", initial_load_path)
        return runs.start(runs.CONFIGS / "grpo.toml", *REWARDED, *load, *more, folder=directory / name)

    found = runs.two_at_a_time(
        {
            "model": lambda: pairs("model", "tiny_reward_model"),
            "dpo": lambda: pairs("dpo", "tiny_dpo"),
        }
    )
    for run in found.values():
        run.succeed()
    # The same command where the checkpoint of the second of four steps is the newest.
    shutil.copytree(directory / "dpo", directory / "resumed")
    shutil.rmtree(directory / "resumed" / "checkpoint" / "step-4")
    export, checkpoint = directory / "model" / "export", directory / "model" / "checkpoint" / "step-4"
    alone = ("reward_model.path", export, "reward_model.is_alone", "true")
    weighted = ("reward_model.path", checkpoint, "reward_model.weight", 0.5)
    found |= runs.two_at_a_time(
        {
            "resumed": lambda: pairs("resumed", "tiny_dpo"),
            "alone": lambda: rl("alone", *alone),
            # Every sibling is the greedy completion, or nearly.
            "weighted": lambda: rl(
                "weighted", *weighted, "algorithm.type", "remax", "sampling.temperature", 0.01
            ),
            "only": lambda: rl("only", "reward_model.path", export, "reward", "[]"),
        }
    )
    return {name: run.succeed() for name, run in found.items()}


@pytest.fixture(scope="module")
def in_transformers(started: dict[str, runs.Run]) -> Any:
    """Prompt and completion tokens to the reward that transformers gives with the exported model."""
    folder = started["model"].folder / "export"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert model.config.num_labels == 1

    def reward(token_ids: Sequence[int]) -> float:
        with torch.no_grad():
            states = model.model(torch.tensor([list(token_ids)])).last_hidden_state
            return float(model.score(states)[0, -1, 0])

    return reward


# ------------------------------------------------------------------------------------------------ pairs


def test_rewards_of_held_out_pairs_are_those_of_transformers_on_the_export(started, in_transformers):
    encoder = PromptEncoder(TINY, system_prompt=None, max_prompt_tokens=64)
    pairs = ArithmeticPreferences(ArithmeticPreferences.Config(**SUMS), "held_out")
    margins = []
    for index in range(len(pairs)):
        documents = encode(preference_of(pairs[index]), encoder).documents
        chosen, rejected = (in_transformers(token_ids) for _, token_ids, _ in documents)
        margins.append(chosen - rejected)
    last = started["model"].summary["evaluations"]["4"]
    assert len(margins) == SUMS["num_held_out"] == started["model"].summary["num_evaluated"]
    assert last["margin"] == pytest.approx(mean(margins), abs=TOLERANCE)
    assert last["accuracy"] == pytest.approx(mean(margin > 0 for margin in margins), abs=1e-9)
    variance = mean((margin - mean(margins)) ** 2 for margin in margins)
    assert last["margin_std"] == pytest.approx(math.sqrt(variance), abs=TOLERANCE)


def test_before_the_first_step_dpo_s_policy_is_its_reference(started):
    first = started["dpo"].summary["evaluations"]["0"]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["margin"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", ["model", "dpo"])
def test_held_out_margins_rise_and_are_logged(started, name):
    evaluations = started[name].summary["evaluations"]
    assert evaluations["4"]["margin"] > evaluations["0"]["margin"] + evaluations["4"]["margin_std"] / 8**0.5
    logged = started[name].metrics()
    for metric in ("accuracy", "margin", "margin_std", "loss"):
        expected = {int(step): values[metric] for step, values in evaluations.items()}
        assert logged[f"evaluation/{metric}"] == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert set(logged["preference/margin_std"]) == {1, 2, 3, 4}


def test_a_resumed_dpo_run_ends_bit_for_bit_where_the_uninterrupted_one_does(started):
    whole, resumed = (started[name].folder / "export" / "model.safetensors" for name in ("dpo", "resumed"))
    assert whole.read_bytes() == resumed.read_bytes()
    assert started["resumed"].summary["evaluations"] == started["dpo"].summary["evaluations"]


# ------------------------------------------------------------------------------------ rewards from a model


def trained_on(run: runs.Run) -> list[dict[str, Any]]:
    """Every recorded rollout of both iterations."""
    return [row for rows in run.rollouts().values() for row in rows]


def learned(row: dict[str, Any], reward: Any) -> float:
    """What transformers gives to a recorded rollout, whose prompt is three or four characters and a start."""
    encoder = PromptEncoder(TINY, system_prompt=None, max_prompt_tokens=64)
    messages = [Message(**message) for message in row["messages"]]
    prompt = encoder.encode(messages)
    assert len(prompt) == row["num_prompt_tokens"]
    return reward([*prompt, *row["completion_token_ids"]])


@pytest.mark.parametrize("name", ["alone", "weighted", "only"])
def test_every_rollout_has_the_model_s_reward(started, in_transformers, name):
    rows = trained_on(started[name])
    assert len(rows) == 2 * 4 * 8
    for row in rows[::5]:
        assert row["reward_parts"]["reward_model"] == pytest.approx(
            learned(row, in_transformers), abs=TOLERANCE
        )
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
            iteration: mean(row["reward_parts"]["reward_model"] for row in rows)
            for iteration, rows in run.rollouts().items()
        }
        assert run.metrics()["reward_part/reward_model"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
