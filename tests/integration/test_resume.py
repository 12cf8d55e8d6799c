"""A run that is killed and started again with the same command does what it would have done otherwise.

Two optimiser steps per iteration, with the generator's log-probabilities as old ones: what decides that is
state, too.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.integration import runs

pytestmark = pytest.mark.slow

ITERATIONS, PROMPTS, GROUP_SIZE, TRAIN_PROMPTS = 6, 8, 8, 17
CHECKPOINT_AT, KILLED_IN = 3, 5  # iterations


class Runs:
    """The same command, uninterrupted and killed; and what starting it again does."""

    def __init__(self, directory: Path, checkpoint: Path) -> None:
        self.directory, self.checkpoint = directory, checkpoint
        self.whole = self.start("whole")
        self.killed = self.start("run")
        self.at_kill = self._kill(self.killed)
        self.whole.succeed()
        for name in ("torn", "seed", "data"):
            shutil.copytree(self.killed.folder, directory / name)
        # Half a checkpoint of a step that the run will reach: data, but no .metadata, which is written last.
        torn = directory / "torn" / "checkpoint" / "step-12"
        shutil.copytree(directory / "torn" / "checkpoint" / "step-6", torn)
        (torn / ".metadata").unlink()
        data = torn / "__0_0.distcp"
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
        self.before = {name: contents(directory / name) for name in ("seed", "data")}
        again = runs.all_of(
            {
                "run": lambda: self.start("run"),
                "torn": lambda: self.start("torn"),
                "seed": lambda: self.start("seed", "debug.seed", 1),
                "data": lambda: self.start("data", "data.source.maximum", 10),
            }
        )
        self.resumed, self.torn, self.other_seed, self.other_data = again.values()
        self.done = contents(self.resumed.folder)
        last = runs.all_of(
            {
                "same": lambda: self.start("run"),
                "without": lambda: self.start("whole", "checkpoint.enable", "false"),
            }
        )
        self.third, self.without_checkpoint = last.values()

    def start(self, name: str, *overrides: object) -> runs.Run:
        return runs.start(
            runs.CONFIGS / "grpo.toml",
            "checkpoint.initial_load_path", self.checkpoint,
            "algorithm.steps_per_iteration", 2,
            "algorithm.old_logprobs", "generator",
            "training.steps", 2 * ITERATIONS,
            "checkpoint.interval", 2 * CHECKPOINT_AT,
            *overrides,
            folder=self.directory / name,
        )  # fmt: skip

    @staticmethod
    def _kill(run: runs.Run) -> dict[str, str]:
        """Kill the rank while it trains on the rollouts of an iteration; returns all recorded rollouts."""
        wanted = run.folder / "rollouts" / f"train-{KILLED_IN:06d}.rank-0.jsonl"
        (rank,) = run.processes
        while not wanted.exists() and rank.is_alive():
            time.sleep(0.005)
        rank.kill()
        assert run.wait() == [-9], run.tail()
        return {path.name: path.read_text() for path in wanted.parent.glob("train-*")}


@pytest.fixture(scope="module")
def started(initial_load_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("resume"), initial_load_path)


def test_the_second_start_continues_from_the_checkpoint(started: Runs) -> None:
    assert len(started.at_kill) == KILLED_IN
    output = started.resumed.succeed().output()  # of both starts
    assert (
        f"Loading the checkpoint from {started.resumed.folder}/checkpoint/step-{2 * CHECKPOINT_AT}." in output
    )
    assert (started.resumed.status["outcome"], started.resumed.status["step"]) == ("done", 2 * ITERATIONS)
    times_logged = [len(re.findall(f" step +{2 * number}/12  reward", output)) for number in range(1, 7)]
    assert times_logged == [1, 1, 1, 2, 1, 1]  # the fifth iteration was killed before it was logged
    assert list(started.resumed.summary["scores"]) == ["0", str(2 * ITERATIONS)]


def test_iterations_done_again_repeat_the_lost_ones(started: Runs) -> None:
    started.resumed.succeed()
    keys = ("prompt_id", "prompt_index", "sample_index", "seed", "completion_token_ids", "reward")
    lost = [f"train-{number:06d}.rank-0.jsonl" for number in range(CHECKPOINT_AT + 1, KILLED_IN + 1)]
    for name in lost:
        before = [json.loads(line) for line in started.at_kill[name].splitlines()]
        after = [json.loads(line) for line in (started.resumed.folder / "rollouts" / name).open()]
        assert len(before) == PROMPTS * GROUP_SIZE
        assert [[r[key] for key in keys] for r in after] == [[r[key] for key in keys] for r in before]
        assert len({tuple(r["completion_token_ids"]) for r in before}) > 5


def test_no_prompt_is_used_twice_in_an_epoch(started: Runs) -> None:
    rollouts = [r for rows in started.resumed.succeed().rollouts().values() for r in rows]
    assert len(rollouts) == ITERATIONS * PROMPTS * GROUP_SIZE
    assert {r["prompt_index"] for r in rollouts} == set(range(ITERATIONS * PROMPTS))
    uses = Counter((r["prompt_index"] // TRAIN_PROMPTS, r["prompt_id"], r["sample_index"]) for r in rollouts)
    assert max(uses.values()) == 1
    first_epoch = {prompt for epoch, prompt, _ in uses if epoch == 0}
    assert len(first_epoch) == TRAIN_PROMPTS
    assert len({r["seed"] for r in rollouts}) == len(rollouts)


def test_the_end_is_bitwise_that_of_the_uninterrupted_run(started: Runs) -> None:
    resumed = started.resumed.succeed()
    assert resumed.rollouts() == started.whole.rollouts()
    assert resumed.rollouts("evaluation") == started.whole.rollouts("evaluation")
    assert resumed.summary["scores"] == started.whole.summary["scores"]
    assert weights(resumed) == weights(started.whole)
    for name in ("grad_norm", "loss/ratio_max", "loss/mismatch_abs", "policy_version", "lr/AdamW"):
        assert resumed.metrics()[name] == started.whole.metrics()[name]


def test_half_a_checkpoint_is_passed_over(started: Runs) -> None:
    assert started.torn.wait() == [0], started.torn.tail()
    assert f"checkpoint/step-{2 * CHECKPOINT_AT}." in started.torn.output()
    assert weights(started.torn) == weights(started.whole)
    assert (started.torn.folder / "checkpoint" / "step-12" / ".metadata").exists()


def test_another_seed_is_refused(started: Runs) -> None:
    assert started.other_seed.wait() == [2], started.other_seed.tail()
    cause = (
        "debug.seed must stay 0 when a run is resumed, because it decides which prompts are drawn; got 1. "
        "Restore it, or choose another dump_folder for a new run."
    )
    check_refusal(started, started.other_seed, cause)


def test_other_prompts_are_refused(started: Runs) -> None:
    assert started.other_data.wait() == [2], started.other_data.tail()
    cause = (
        "data.source must stay the same when a run is resumed, because the cursor counts its prompts; "
        "got other prompts. Restore it, or choose another dump_folder for a new run."
    )
    check_refusal(started, started.other_data, cause)


def check_refusal(started: Runs, run: runs.Run, cause: str) -> None:
    assert cause in run.output()
    assert "Traceback" not in run.output()
    # The folder is byte for byte as the killed run left it: its configuration and status, too.
    assert contents(run.folder) == started.before[run.folder.name]
    assert run.status["outcome"] == "running"


def test_a_run_that_is_done_says_so_and_touches_nothing(started: Runs) -> None:
    started.resumed.succeed()
    assert started.third.wait() == [0], started.third.tail()
    said = started.third.output().rpartition("nothing is left to do.")[2]
    assert f"Done: {2 * ITERATIONS} steps" in said
    assert "Held-out score: " in said
    assert contents(started.third.folder) == started.done


def test_without_its_checkpoints_another_run_is_refused_in_the_folder(started: Runs) -> None:
    run = started.without_checkpoint
    assert run.wait() == [2], run.tail()
    cause = (
        "dump_folder must hold nothing of another run, or a checkpoint to continue from with "
        f"checkpoint.enable = true; got {run.folder} with "
    )
    assert cause in run.output()
    assert f"Choose another dump_folder, or delete {run.folder} if" in run.output()
    assert sorted(run.rollouts()) == list(range(1, ITERATIONS + 1))
    assert run.status["outcome"] == "done"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights(run: runs.Run) -> bytes:
    return (run.folder / "export" / "model.safetensors").read_bytes()
