"""DPO as a user starts it: learning beyond noise, resume, two ranks, and the export; other losses briefly."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration import pair_runs, runs

pytestmark = pytest.mark.slow

CONFIG = runs.CONFIGS / "dpo.toml"
TOLERANCE = 1e-4  # nats
BETA = 0.1


@pytest.fixture(scope="module")
def started(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    return pair_runs.start_all(CONFIG, initial_load_path, tmp_path_factory.mktemp("dpo"))


@pytest.fixture(scope="module")
def others(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    """A loss with a baseline over mismatched completions, and one without a reference."""
    directory = tmp_path_factory.mktemp("losses")
    return runs.all_of(
        {
            name: lambda name=name: runs.start(
                CONFIG,
                "checkpoint.initial_load_path", initial_load_path,
                "loss.type", name,
                "training.steps", 4,
                "model.export", "false",
                folder=directory / name,
            )
            for name in ("kto", "orpo")
        }
    )  # fmt: skip


def test_it_learns_beyond_noise_and_says_so(started):
    run = started["whole"]
    pair_runs.assert_learned(run)
    before = pair_runs.evaluations(run)[0]
    assert before["accuracy"] == pytest.approx(0.5, abs=0.2)  # policy and reference are equal: rounding
    assert before["margin"] == pytest.approx(0.0, abs=1e-6)
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_the_export_has_the_evaluated_log_probabilities_in_transformers(started):
    run = started["whole"]
    model = AutoModelForCausalLM.from_pretrained(run.folder / "export", dtype=torch.float32)
    found: dict[str, list[float]] = {"chosen": [], "rejected": []}
    for side, ids, mask in pair_runs.held_out(CONFIG):
        with torch.no_grad():
            logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found[side].append(sum(logs[i - 1, ids[i]].item() for i in range(len(ids)) if mask[i]))
    assert [len(values) for values in found.values()] == [40, 40]
    last, first = pair_runs.evaluations(run)[pair_runs.STEPS], pair_runs.evaluations(run)[0]
    for side, values in found.items():
        assert last[f"{side}_logprob"] == pytest.approx(fmean(values), abs=TOLERANCE)
        moved = BETA * (fmean(values) - first[f"{side}_logprob"])  # against the reference, the first policy
        assert last[f"{side}_reward"] == pytest.approx(moved, abs=TOLERANCE)


def test_a_resumed_run_ends_bit_for_bit_like_the_uninterrupted_one(started):
    assert "/checkpoint/step-4." in started["resumed"].output()
    assert "step 0  held-out accuracy" not in started["resumed"].output()
    pair_runs.assert_same_end(started["resumed"], started["whole"])


def test_two_ranks_end_where_one_does(started):
    pair_runs.assert_close_end(started["whole"], started["two_ranks"])


def test_the_reference_is_scored_once_and_read_by_the_second_start(started):
    pairs = 40 + 16 * pair_runs.STEPS  # held out, and drawn in the run
    for name, scored in (("whole", 2 * pairs), ("resumed", 0)):
        assert f"Reference: {2 * pairs} completions, {scored} of them scored now" in started[name].output()


@pytest.mark.parametrize("name", ["kto", "orpo"])
def test_other_losses_run_and_lower_themselves(others, name):
    run = others[name].succeed()
    found = pair_runs.evaluations(run)
    assert found[4]["loss"] < found[0]["loss"]
    assert found[4]["chosen_logprob"] - found[4]["rejected_logprob"] > (
        found[0]["chosen_logprob"] - found[0]["rejected_logprob"]
    )
    assert ("kl_baseline" in found[4]) == (name == "kto")
    assert (run.folder / "reference").exists() == (name == "kto")
