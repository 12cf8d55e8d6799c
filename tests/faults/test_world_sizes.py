"""E1 and E3: a run goes on with another number of ranks, and is still the same run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.faults import jobs, walks
from tests.integration import runs
from titan_rl.resilience import faults, journal

pytestmark = [pytest.mark.slow, pytest.mark.faults]

STEPS = 12
SETTINGS = ("training.steps", STEPS, "data.prompts_per_iteration", 6, "checkpoint.interval", 1)
PARTS = ((2, 3), (1, 5), (2, 7), (4, 9), (3, 12))  # ranks, and the step whose checkpoint is the last


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """Two ranks throughout, sampling."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    return jobs.start(folder, *walks.SETTINGS, *SETTINGS, ranks=2).succeed()


def go_through_the_sizes(folder: Path, *overrides: object) -> runs.Run:
    """The same command on one number of ranks after the other; each start but the last is killed."""
    for ranks, last in PARTS:
        killed = f"checkpoint.after_commit:{last}:{ranks - 1}:0:sigkill" if last < STEPS else ""
        run = jobs.start(folder, *walks.SETTINGS, *SETTINGS, *overrides, ranks=ranks, faults=killed)
        codes = run.wait()
        assert codes[-1] == (-9 if killed else 0), run.tail()
    assert len(faults.witnesses(folder)) == len(PARTS) - 1
    return run


def sizes(folder: Path) -> list[tuple[int, int]]:
    """Ranks of each start, and the step it went on from."""
    lines = runs.read_lines(folder / "journal" / "rank-0.jsonl")
    return [(line["world_size"], line["resumed_step"]) for line in lines if "resumed_step" in line]


def drawn(run: runs.Run) -> list[tuple[int, str, int, int]]:
    """Prompts, samples and seeds in the order in which they were drawn."""
    rows = [r for rows in run.rollouts().values() for r in rows]
    return sorted((r["prompt_index"], r["prompt_id"], r["sample_index"], r["seed"]) for r in rows)


def largest_difference(run: runs.Run, other: runs.Run) -> float:
    mine, theirs = (load_file(one.folder / "export" / "model.safetensors") for one in (run, other))
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def test_with_replayed_rollouts_the_parameters_are_the_same(tmp_path: Path, recorded: runs.Run) -> None:
    """6 prompts on 4 ranks: two of them have one prompt, the others two, so rows are empty in between."""
    replay = ("generator.type", "tests.faults.replay:ReplayGenerator", "generator.recorded", recorded.folder)
    run = go_through_the_sizes(tmp_path / "run", *replay)
    starts = [1, *(last + 1 for _, last in PARTS)]
    assert sizes(run.folder) == [(ranks, first - 1) for (ranks, _), first in zip(PARTS, starts, strict=False)]
    mine, expected = journal.read(run.folder), journal.read(recorded.folder)
    assert len(mine) == STEPS
    for name in ("step", "policy_version", "prompts", "rollouts", "rewards"):
        assert [getattr(entry, name) for entry in mine] == [getattr(entry, name) for entry in expected]
    assert drawn(run) == drawn(recorded)
    assert largest_difference(run, recorded) <= 1e-5
    assert run.metrics()["lr/AdamW"] == recorded.metrics()["lr/AdamW"]


def test_sampling_live_prompts_and_seeds_are_the_same(tmp_path: Path, recorded: runs.Run) -> None:
    run = go_through_the_sizes(tmp_path / "run")
    mine, expected = journal.read(run.folder), journal.read(recorded.folder)
    assert [entry.prompts for entry in mine] == [entry.prompts for entry in expected]
    assert drawn(run) == drawn(recorded)
    # The first part is on as many ranks: the same bits.
    assert mine[:3] == expected[:3]


def test_the_parameters_of_another_run_differ_by_more(tmp_path: Path, recorded: runs.Run) -> None:
    """The bound can be missed: one prompt fewer in a step."""
    other = jobs.start(
        tmp_path / "run", *walks.SETTINGS, *SETTINGS, "optimizer.lr", 2.9e-4, ranks=2
    ).succeed()
    assert largest_difference(other, recorded) > 1e-5
    assert torch.isfinite(torch.tensor(largest_difference(other, recorded)))
