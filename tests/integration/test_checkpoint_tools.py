"""What is in a checkpoint of each trainer, and what titan-rl makes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults import jobs
from tests.integration import runs
from titan_rl.errors import ConfigError
from titan_rl.resilience import manifest as manifests
from titan_rl.resilience import shelf
from titan_rl.tools.checkpoints import report

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, runs.Run]:
    """A run of each kind, exported at its end, on two ranks."""
    folder = tmp_path_factory.mktemp("done")
    export = ("model.export", "true")
    pairs = (*export, "training.steps", 4, "evaluation.interval_steps", 2)
    starts = {
        "rl": lambda: jobs.start(folder / "rl", "evaluation.interval_steps", 2, ranks=2),
        "supervised": lambda: jobs.start(folder / "sft", *export, config="sft", ranks=2),
        "preference": lambda: jobs.start(folder / "dpo", *pairs, config="dpo", ranks=2),
        "reward_model": lambda: jobs.start(folder / "rm", *pairs, config="reward_model", ranks=2),
    }
    return {name: run.succeed() for name, run in runs.all_of(starts).items()}


def manifest(run: runs.Run, step: int) -> manifests.Manifest:
    return manifests.read(run.folder / "checkpoint" / f"step-{step}")


def test_a_manifest_says_what_was_measured_at_its_step(done: dict[str, runs.Run]) -> None:
    rl = manifest(done["rl"], 4)
    assert rl.facts.held_out == manifests.HeldOut("evaluation/score", done["rl"].summary["scores"]["4"])
    rewards = [rollout["reward"] for rollout in done["rl"].rollouts()[4]]
    assert rl.facts.reward == pytest.approx(sum(rewards) / len(rewards))
    assert (rl.facts.trainer, rl.world_size, rl.facts.state["rl_state"]["iteration"]) == ("rl", 2, 4)
    validation = done["supervised"].json("validation.json")["steps"]
    for step in (2, 4, 6):
        held_out = manifest(done["supervised"], step).facts.held_out
        expected = manifests.HeldOut("validation/loss", validation[str(step)]["loss"], is_higher_better=False)
        assert held_out == expected
    evaluations = done["preference"].summary["evaluations"]
    held_out = manifest(done["preference"], 2).facts.held_out
    assert held_out == manifests.HeldOut("evaluation/accuracy", evaluations["2"]["accuracy"])


@pytest.mark.parametrize("kind", ["rl", "supervised", "preference", "reward_model"])
def test_a_checkpoint_is_sound_and_its_export_is_that_of_the_run(
    kind: str, done: dict[str, runs.Run], tmp_path: Path
) -> None:
    run = done[kind]
    text, is_sound = report(run.folder, verify=True)
    assert is_sound, text
    last = run.status["step"]
    out = runs.forked(export, str(run.folder / "checkpoint" / f"step-{last}"), str(tmp_path / "out"))
    for path in sorted((run.folder / "export").iterdir()):
        assert (Path(out) / path.name).read_bytes() == path.read_bytes(), path.name


def export(checkpoint: str, directory: str) -> str:
    from titan_rl.tools.export import export as convert

    return str(convert(Path(checkpoint), Path(directory)))


def test_a_damaged_checkpoint_is_not_exported(done: dict[str, runs.Run], tmp_path: Path) -> None:
    checkpoint = shutil.copytree(done["rl"].folder / "checkpoint" / "step-2", tmp_path / "step-2")
    shard = checkpoint / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert shelf.entry(checkpoint).fault is None
    with pytest.raises(ConfigError, match=r"CHECKPOINT must be a complete checkpoint .* expected SHA-256"):
        runs.forked(export, str(checkpoint), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
