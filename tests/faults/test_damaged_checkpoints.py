"""C2 and C4: what is damaged is named and not used, and a roll-back loses nothing that is saved after it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import jobs
from tests.integration import runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """Two ranks, checkpoints of steps 2, 4 and 6."""
    return jobs.start(tmp_path_factory.mktemp("saved") / "run", ranks=2).succeed()


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """The same up to step 8, never interrupted."""
    folder = tmp_path_factory.mktemp("longer") / "run"
    return jobs.start(folder, "training.steps", 8, ranks=2).succeed()


def truncate(directory: Path) -> None:
    shard = directory / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])


def flip(directory: Path) -> None:
    shard = directory / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def empty(directory: Path) -> None:
    (directory / "__0_0.distcp").write_bytes(b"")


def lose_metadata(directory: Path) -> None:
    (directory / ".metadata").unlink()


def lose_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def block(directory: Path) -> None:
    """A file that cannot be read, whoever asks."""
    (directory / "__1_0.distcp").unlink()
    (directory / "__1_0.distcp").mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "step-6/__1_0.distcp: expected"),
    "flipped": (flip, "step-6/__1_0.distcp: expected SHA-256"),
    "emptied": (empty, "step-6/__0_0.distcp: expected"),
    "no metadata": (lose_metadata, "step-6/.metadata: expected"),
    "no manifest": (lose_manifest, "step-6 has no manifest.json"),
    "unreadable": (block, "step-6/__1_0.distcp"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    name: str, saved: runs.Run, longer: runs.Run, tmp_path: Path
) -> None:
    damage, message = DAMAGES[name]
    folder = shutil.copytree(saved.folder, tmp_path / "run")
    damage(folder / "checkpoint" / "step-6")
    (folder / "checkpoint" / "step-99").mkdir()  # junk besides
    run = jobs.start(folder, "training.steps", 8, ranks=2).succeed()
    assert message in run.output()
    assert "step-99 has no manifest.json" in run.output()
    assert f"Loading the checkpoint from {folder}/checkpoint/step-4." in run.output()
    # Steps 5 to 8 are done again, and step 6 takes the place of what was damaged.
    assert jobs.complete_steps(run) == [2, 4, 6, 8]
    assert jobs.weights(run) == jobs.weights(longer)


@pytest.mark.parametrize("name", ["truncated", "flipped"])
def test_a_damaged_checkpoint_that_is_asked_for_is_an_error_and_nothing_changes(
    name: str, saved: runs.Run, tmp_path: Path
) -> None:
    damage, message = DAMAGES[name]
    folder = shutil.copytree(saved.folder, tmp_path / "run")
    damage(folder / "checkpoint" / "step-6")
    before = sorted(path.name for path in (folder / "checkpoint").iterdir())
    run = jobs.start(folder, "checkpoint.load_step", 6, "training.steps", 8, ranks=2)
    assert run.wait() == [2, 2], run.tail()
    expected = "checkpoint.load_step must name a complete checkpoint of this run; got 6: " + message
    assert expected in run.output()
    assert "Traceback" not in run.output()
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == before


def test_with_no_complete_checkpoint_left_a_run_does_not_begin_again_unasked(
    saved: runs.Run, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved.folder, tmp_path / "run")
    for step in (2, 4, 6):
        flip(folder / "checkpoint" / f"step-{step}")
    run = jobs.start(folder, "training.steps", 8, ranks=2)
    assert run.wait() == [2, 2], run.tail()
    assert "dump_folder must hold a complete checkpoint to resume from, or none at all" in run.output()
    assert "No checkpoint was provided, this is a fresh start" not in run.output()


def test_after_a_rollback_what_is_saved_survives_and_is_what_is_resumed(
    saved: runs.Run, tmp_path: Path
) -> None:
    """C4: rolled back to 2 while 4 and 6 exist, two kept."""
    folder = shutil.copytree(saved.folder, tmp_path / "run")
    kept = ("checkpoint.keep_latest_k", 2, "resilience.keep_best", 0, "checkpoint.interval", 1)
    run = jobs.start(folder, *kept, "checkpoint.load_step", 2, "training.steps", 3, ranks=2).succeed()
    assert f"Loading the checkpoint from {folder}/checkpoint/step-2." in run.output()
    assert jobs.complete_steps(run) == [6, 3]
    again = jobs.start(folder, *kept, "training.steps", 5, ranks=2).succeed()
    assert f"Loading the checkpoint from {folder}/checkpoint/step-3." in again.output()
    assert jobs.complete_steps(again) == [4, 5]
    assert jobs.leftovers(again) == []
