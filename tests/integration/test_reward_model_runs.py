"""Reward models as a user trains them: learning, resume, two ranks, the export, and rewards in an RL run."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from tests.integration import pair_runs, runs
from titan_rl.data.chat import PromptEncoder
from titan_rl.types import Message

pytestmark = pytest.mark.slow

CONFIG = runs.CONFIGS / "reward_model.toml"
TOLERANCE = 1e-4  # units of reward


@pytest.fixture(scope="module")
def started(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    """Also an RL run whose rewards are the model's alone."""
    directory = tmp_path_factory.mktemp("reward_model")
    found = pair_runs.start_all(CONFIG, initial_load_path, directory)
    found["rl"] = runs.start(
        runs.CONFIGS / "grpo.toml",
        "checkpoint.initial_load_path", initial_load_path,
        "reward_model.path", found["whole"].folder / "export",
        "reward_model.weight", 0.5,
        "reward", "[]",
        "training.steps", 2,
        "data.prompts_per_iteration", 4,
        "model.export", "false",
        folder=directory / "rl",
    ).succeed()  # fmt: skip
    return found


@pytest.fixture(scope="module")
def exported(started: dict[str, runs.Run]) -> PreTrainedModel:
    folder = started["whole"].folder / "export"
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()


def reward(model: PreTrainedModel, ids: list[int]) -> float:
    with torch.no_grad():
        (value,) = model(torch.tensor([ids])).logits[0].tolist()
    return value


def test_it_learns_beyond_noise_and_says_so(started):
    pair_runs.assert_learned(started["whole"])


def test_the_export_gives_the_evaluated_rewards_in_transformers(started, exported):
    found: dict[str, list[float]] = {"chosen": [], "rejected": []}
    for side, ids, _ in pair_runs.held_out(CONFIG):
        found[side].append(reward(exported, ids))
    last = pair_runs.evaluations(started["whole"])[pair_runs.STEPS]
    for side, values in found.items():
        assert last[f"{side}_reward"] == pytest.approx(fmean(values), abs=TOLERANCE)
    right = [c > r for c, r in zip(found["chosen"], found["rejected"], strict=True)]
    assert last["accuracy"] == pytest.approx(fmean(right))


def test_a_resumed_run_ends_bit_for_bit_like_the_uninterrupted_one(started):
    assert "/checkpoint/step-4." in started["resumed"].output()
    pair_runs.assert_same_end(started["resumed"], started["whole"])


def test_two_ranks_end_where_one_does(started):
    pair_runs.assert_close_end(started["whole"], started["two_ranks"])


def test_in_rl_every_rollout_has_the_reward_that_transformers_gives_it(started, exported):
    run = started["rl"]
    metrics = run.metrics()
    encoder = PromptEncoder(str(pair_runs.TINY), system_prompt=None, max_prompt_tokens=64)
    for iteration, rollouts in run.rollouts().items():
        assert len(rollouts) == 32
        prompts = [encoder.encode([Message(**m) for m in r["messages"]]) for r in rollouts]
        assert [len(ids) for ids in prompts] == [r["num_prompt_tokens"] for r in rollouts]
        values = [
            reward(exported, [*ids, *r["completion_token_ids"]])
            for ids, r in zip(prompts, rollouts, strict=True)
        ]
        assert max(values) - min(values) > 0.1
        for rollout, value in zip(rollouts, values, strict=True):
            assert rollout["reward_parts"] == {"reward_model": pytest.approx(value, abs=TOLERANCE)}
            assert rollout["reward"] == pytest.approx(0.5 * value, abs=TOLERANCE)
        assert metrics["reward_part/reward_model"][iteration] == pytest.approx(fmean(values), abs=TOLERANCE)
    assert all(norm > 0 for norm in metrics["grad_norm"].values())
