"""Preference and reward-model runs for the tests of both: how they are started, and what they hold out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration import runs
from titan_rl.config.choice import build
from titan_rl.config.entry import read_checked
from titan_rl.config.overlay import overlay
from titan_rl.data.chat import PromptEncoder
from titan_rl.data.preferences import encode, preference_of
from titan_rl.trainers.pair_sections import PairDataSection

STEPS, HALF = 8, 4
TINY = runs.ROOT / "titan_rl" / "assets" / "tiny_llama"


def start_all(config: Path, checkpoint: Path, directory: Path) -> dict[str, runs.Run]:
    """The whole run; the same command where the checkpoint of half way is the newest; and two ranks."""
    common = ("checkpoint.initial_load_path", checkpoint)
    found = runs.all_of(
        {
            "whole": lambda: runs.start(config, *common, folder=directory / "whole"),
            "two_ranks": lambda: runs.start(
                config, *common, "training.local_batch_size", 1, folder=directory / "two", ranks=2
            ),
        }
    )
    found["whole"].succeed()
    shutil.copytree(directory / "whole", directory / "resumed")
    shutil.rmtree(directory / "resumed" / "checkpoint" / f"step-{STEPS}")
    shutil.rmtree(directory / "resumed" / "export")
    found["resumed"] = runs.start(config, *common, folder=directory / "resumed")
    return {name: run.succeed() for name, run in found.items()}


def held_out(config: Path) -> Iterator[tuple[str, list[int], list[bool]]]:
    """Side, token ids and mask of every held-out document, in their order."""
    document, _ = read_checked(str(config), [])
    section = overlay(PairDataSection(), document.table["data"])
    data = build(section.source, split="held_out")
    encoder = PromptEncoder(str(TINY), system_prompt=None, max_prompt_tokens=64)
    for index in range(len(data)):
        yield from encode(preference_of(data[index]), encoder).documents


def evaluations(run: runs.Run) -> dict[int, dict[str, float]]:
    """Held-out metrics by step."""
    return {int(step): metrics for step, metrics in run.summary["evaluations"].items()}


def assert_learned(run: runs.Run) -> None:
    """Held-out accuracy and margin rise by far more than their standard errors, and everything is logged."""
    assert (run.status["outcome"], run.status["step"]) == ("done", STEPS)
    found, summary = evaluations(run), run.summary
    assert list(found) == [0, HALF, STEPS]
    assert summary["num_evaluated"] == 40
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (
        found[0]["accuracy"],
        found[STEPS]["accuracy"],
    )
    assert found[STEPS]["accuracy"] >= found[0]["accuracy"] + 0.3  # a standard error is at most 0.08
    assert found[STEPS]["loss"] < found[HALF]["loss"] < found[0]["loss"]
    assert found[STEPS]["margin"] > found[0]["margin"] + 4 * found[STEPS]["margin_std"] / 40**0.5
    logged = run.metrics()
    for name in ("accuracy", "margin", "margin_std", "loss"):
        by_step = {step: metrics[name] for step, metrics in found.items()}
        assert logged[f"evaluation/{name}"] == pytest.approx(by_step, rel=1e-6)
        assert sorted(logged[f"preference/{name}"]) == list(range(1, STEPS + 1))
    assert logged["skipped_steps"][STEPS] == 0
    assert logged["policy_version"][STEPS] == STEPS


def assert_same_end(one: runs.Run, other: runs.Run) -> None:
    """Evaluations and exported weights are equal bit for bit."""
    assert evaluations(one) == evaluations(other)
    weights, others = (load_file(run.folder / "export" / "model.safetensors") for run in (one, other))
    assert weights.keys() == others.keys()
    assert all(weights[name].equal(others[name]) for name in weights)


def assert_close_end(one: runs.Run, other: runs.Run) -> None:
    """Evaluations agree within 1e-3: ranks and rows add up in another order, and eight steps amplify it."""
    expected, found = evaluations(one), evaluations(other)
    assert found.keys() == expected.keys()
    for step, metrics in expected.items():
        assert found[step] == pytest.approx(metrics, rel=1e-3, abs=1e-3), step
