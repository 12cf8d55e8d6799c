"""A run that is stopped under FSDP on two ranks goes on under tensor parallelism, and on one rank.

SIGTERM ends it after some step; the next step is then taken in the other layouts, and compared with that of
the run that was not stopped. Prompts and seeds are exactly the same, what is computed is within 1e-5.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.faults import jobs
from tests.integration import runs

pytestmark = pytest.mark.slow

STEPS, BOUND = 4, 1e-5
FSDP = ("parallelism.data_parallel_shard_degree", 2)
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "tensor parallel": (
        2,
        ("parallelism.data_parallel_shard_degree", 1, "parallelism.tensor_parallel_degree", 2),
    ),
    "one rank": (1, ()),
}


class Stopped:
    """The uninterrupted run, the stopped one, and the step that each layout takes next."""

    def __init__(self, directory: Path, checkpoint: Path) -> None:
        self._common = ("checkpoint.initial_load_path", checkpoint, "checkpoint.interval", 1)
        self.whole = self._start(directory / "whole", *FSDP, "training.steps", STEPS, ranks=2).succeed()
        stopped = self._start(directory / "stopped", *FSDP, "training.steps", STEPS, ranks=2, is_slow=True)
        second = stopped.folder / "rollouts" / "train-000002.rank-1.jsonl"
        jobs.wait_until(stopped, second.exists)
        os.kill(stopped.processes[1].pid, signal.SIGTERM)
        assert stopped.wait(120) == [0, 0], stopped.tail()
        assert stopped.status["outcome"] == "preempted"
        self.step = stopped.status["step"] + 1
        assert 2 < self.step <= STEPS
        self.resumed = {name: self._resume(stopped.folder, name) for name in LAYOUTS}

    def _resume(self, folder: Path, name: str) -> runs.Run:
        ranks, layout = LAYOUTS[name]
        copy = folder.with_name(name.replace(" ", "_"))
        shutil.copytree(folder, copy)
        return self._start(copy, *layout, "training.steps", self.step, ranks=ranks).succeed()

    def _start(self, folder: Path, *overrides: object, ranks: int, is_slow: bool = False) -> runs.Run:
        slow = ("generator.seconds_per_token", 0.3) if is_slow else ()
        return runs.start(
            runs.CONFIGS / "grpo.toml",
            "generator.type", jobs.PLANTED, *slow,
            *self._common,
            *overrides,
            folder=folder,
            ranks=ranks,
        )  # fmt: skip


@pytest.fixture(scope="module")
def stopped(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    return Stopped(tmp_path_factory.mktemp("layouts"), initial_load_path)


def rollouts(run: runs.Run, step: int) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Of an iteration, by prompt, sample and seed."""
    names = ("prompt_index", "prompt_id", "sample_index", "seed")
    return {tuple(r[name] for name in names): r for r in run.rollouts()[step]}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_next_prompts_and_seeds_are_those_of_the_run_that_was_not_stopped(
    stopped: Stopped, name: str
) -> None:
    run, before = stopped.resumed[name], stopped.step - 1
    assert f"Loading the checkpoint from {run.folder}/checkpoint/step-{before}." in run.output()
    assert (run.status["outcome"], run.status["step"]) == ("done", stopped.step)
    mine, expected = rollouts(run, stopped.step), rollouts(stopped.whole, stopped.step)
    assert len(mine) == 64
    assert mine.keys() == expected.keys()
    for step in range(1, stopped.step):
        assert not mine.keys() & rollouts(stopped.whole, step).keys()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_restored_policy_samples_the_same_tokens_with_the_same_log_probabilities(
    stopped: Stopped, name: str
) -> None:
    run, step = stopped.resumed[name], stopped.step
    expected = rollouts(stopped.whole, step)
    for key, rollout in rollouts(run, step).items():
        assert rollout["completion_token_ids"] == expected[key]["completion_token_ids"]
        assert rollout["generator_logprobs"] == pytest.approx(expected[key]["generator_logprobs"], abs=BOUND)
        assert rollout["advantage"] == pytest.approx(expected[key]["advantage"], abs=BOUND)
    # The trainer's own log-probabilities, computed under the new layout, against the generator's.
    assert run.metrics()["loss/mismatch_abs_max"][step] <= 2 * BOUND


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_next_step_is_that_of_the_run_that_was_not_stopped(stopped: Stopped, name: str) -> None:
    run, step = stopped.resumed[name], stopped.step
    mine, expected = run.metrics(), stopped.whole.metrics()
    for metric in ("loss/loss", "grad_norm", "loss/reference_kl", "loss/entropy"):
        assert mine[metric][step] == pytest.approx(expected[metric][step], rel=1e-4, abs=1e-6)
    assert mine["grad_norm"][step] > 0.1
    got, wanted = (tensors(r.folder / "checkpoint" / f"step-{step}") for r in (run, stopped.whole))
    before = tensors(stopped.whole.folder / "checkpoint" / f"step-{step - 1}")
    assert got.keys() == wanted.keys()
    norms = "guard.norms"  # of the steps so far, filled up with NaN
    torch.testing.assert_close(got[norms], wanted[norms], rtol=0, atol=BOUND, equal_nan=True)
    weights = [key for key in got if ".exp_avg" not in key and key != norms and got[key].numel() > 1]
    assert len(weights) >= 30
    for key in weights:
        assert (got[key] - wanted[key]).abs().max() <= BOUND, key
    # The step moved every weight by far more than that: its moments were the restored ones.
    assert max(float((wanted[key] - before[key]).abs().max()) for key in weights) > 10 * BOUND


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in stored.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return {key: value.float() for key, value in state.items()}
