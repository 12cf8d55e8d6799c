"""The same run on one and on two ranks: the same prompts, seeds and first step, and both learn.

With the local generator, and with vLLM: one on each of two ranks, and one over both (tensor parallelism).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.integration import runs

pytestmark = pytest.mark.slow

PROMPTS, GROUP_SIZE, STEPS = 8, 8, 6
VLLM = ("generator.type", "vllm", "generator.kv_cache_gib", 0.125, "training.steps", 2)
RUNS = {
    "one rank": (1, ("training.steps", STEPS)),
    "two ranks": (2, ("training.steps", STEPS)),
    "vllm on each rank": (2, VLLM),
    "vllm over both ranks": (2, (*VLLM, "generator.tensor_parallel_degree", 2)),
}
HAS_VLLM = importlib.util.find_spec("vllm") is not None
NAMES = [name for name in RUNS if HAS_VLLM or "vllm" not in name]

Key = tuple[int, str, int, int]


@pytest.fixture(scope="module")
def started(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    directory = tmp_path_factory.mktemp("ranks")

    def start(name: str) -> runs.Run:
        ranks, overrides = RUNS[name]
        return runs.start(
            runs.CONFIGS / "grpo.toml",
            "checkpoint.initial_load_path", initial_load_path,
            *overrides,
            folder=directory / name.replace(" ", "_"),
            ranks=ranks,
        )  # fmt: skip

    # Those of two ranks have the two cores for themselves.
    return {name: start(name).succeed() for name in NAMES}


def keys(rollouts: list[dict[str, Any]]) -> list[Key]:
    return sorted((r["prompt_index"], r["prompt_id"], r["sample_index"], r["seed"]) for r in rollouts)


def shares(run: runs.Run, iteration: int) -> list[set[Key]]:
    """What each rank recorded."""
    files = sorted((run.folder / "rollouts").glob(f"train-{iteration:06d}.rank-*.jsonl"))
    return [set(keys(runs.read_lines(file))) for file in files]


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_is_drawn_once_with_the_seed_that_it_always_has(
    started: dict[str, runs.Run], name: str
) -> None:
    rollouts, expected = started[name].rollouts(), started["one rank"].rollouts()
    for iteration in (1, 2):
        found = keys(rollouts[iteration])
        assert len(found) == len(set(found)) == PROMPTS * GROUP_SIZE
        assert found == keys(expected[iteration])


@pytest.mark.parametrize("name", NAMES[1:])
def test_each_of_two_ranks_has_half_of_the_prompts(started: dict[str, runs.Run], name: str) -> None:
    for iteration in (1, 2):
        first, second = shares(started[name], iteration)
        assert len(first) == len(second) == PROMPTS * GROUP_SIZE // 2
        assert not {key[0] for key in first} & {key[0] for key in second}


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_take_the_steps_that_one_takes(started: dict[str, runs.Run], name: str) -> None:
    run = started[name]
    steps = 2 if "vllm" in name else STEPS
    assert (run.status["step"], run.summary["policy_version"]) == (steps, steps)
    assert sorted(run.rollouts()) == list(range(1, steps + 1))


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_first_iteration_is_that_of_one_rank(started: dict[str, runs.Run], name: str) -> None:
    # vLLM draws other tokens from the same seed than the local generator, but the same on any layout.
    other = "vllm on each rank" if "vllm" in name else "one rank"
    assert completions(started[name], 1) == completions(started[other], 1)
    mine, expected = started[name].metrics(), started[other].metrics()
    for metric in ("reward/mean", "reward/std", "rollout/completion_tokens", "grad_norm", "loss/loss"):
        assert mine[metric][1] == pytest.approx(expected[metric][1], abs=1e-4)
    assert mine["grad_norm"][1] > 0.1
    assert mine["evaluation/score"][0] == expected["evaluation/score"][0]


@pytest.mark.parametrize("name", ["one rank", "two ranks"])
def test_it_learns(started: dict[str, runs.Run], name: str) -> None:
    summary = started[name].summary
    assert summary["num_evaluated"] == 8
    assert summary["score_after"] - summary["score_before"] >= 0.5


def completions(run: runs.Run, iteration: int) -> dict[Key, list[int]]:
    rollouts = run.rollouts()[iteration]
    return {keys([rollout])[0]: rollout["completion_token_ids"] for rollout in rollouts}
