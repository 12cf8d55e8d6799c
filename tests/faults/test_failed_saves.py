"""C3: a checkpoint that cannot be written is counted, leaves nothing, and ends the run by policy only."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import jobs
from tests.integration import runs
from titan_rl.resilience import shelf

pytestmark = pytest.mark.slow

# In a mount namespace of its own: nothing is left mounted, however the test ends. What was on the small file
# system is copied out before it goes.
ON_A_SMALL_DISK = """
mkdir -p "$FOLDER/checkpoint" && mount -t tmpfs -o size=$SIZE tmpfs "$FOLDER/checkpoint" || exit 99
"$@"
code=$?
cp -r "$FOLDER/checkpoint" "$FOLDER/copy"
exit $code
"""


def may_mount() -> bool:
    command = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /tmp"]
    return shutil.which("unshare") is not None and subprocess.run(command, check=False).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount: run it as root")
def test_a_full_disk_ends_the_run_after_the_allowed_failures_and_the_checkpoint_before_is_intact(
    tmp_path: Path,
) -> None:
    """Two ranks under torchrun, and room for one checkpoint and a half: ENOSPC comes from the kernel."""
    folder = tmp_path / "run"
    settings = {
        "dump_folder": folder,
        "checkpoint.interval": 1,
        "checkpoint.keep_latest_k": 2,
        "resilience.max_failed_saves": 3,
        "training.steps": 12,
    }
    options = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    small_disk = ["unshare", "--mount", "sh", "-c", ON_A_SMALL_DISK, "sh"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = runs.spawn(
        [*small_disk, *launch, "-m", "titan_rl.train", str(jobs.CONFIGS / "grpo.toml"), *options],
        folder=folder,
        environment={"FOLDER": str(folder), "SIZE": "16m"},
    )
    assert run.wait() == [1], run.tail()
    output, kept = run.output(), folder / "copy"
    # Steps 2, 3 and 4 fail one after another; training goes on in between.
    assert "The checkpoint of step 2 could not be written: " in output
    assert "Training goes on; the one before it is intact. 2 of at most 3 failures in a row." in output
    assert "SaveError: The checkpoint of step 4 could not be written: " in output
    assert "3 in a row have failed, as many as resilience.max_failed_saves allows" in output
    assert " step  5/12" not in output
    assert [manifest.step for _, manifest in shelf.complete(shelf.entries(kept))] == [1]
    assert [path.name for path in kept.iterdir() if not path.name.startswith("failed")] == ["step-1"]
    assert run.status["outcome"] == "failed"
    listed = subprocess.run(
        [sys.executable, "-m", "titan_rl.cli", "checkpoints", str(kept), "--verify"],
        capture_output=True,
        text=True,
        check=True,
        cwd=runs.ROOT,
    )
    assert "verified, newest" in listed.stdout


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_an_input_output_error_does_not_end_the_run_before_its_last_checkpoint(
    mode: str, tmp_path: Path
) -> None:
    run = jobs.start(
        tmp_path / "run", "checkpoint.async_mode", mode, ranks=2, point="write_error", step=4, rank=1
    )
    assert run.wait() == [1, 1], run.tail()
    output = run.output()
    assert "The checkpoint of step 4 could not be written: rank 1: OSError: [Errno 5]" in output
    assert (
        output.count("SaveError: The last checkpoint, of step 6, could not be written") == 2
    )  # on both ranks
    assert "step 6/6" in output
    assert jobs.complete_steps(run) == [2]
    assert jobs.leftovers(run) == []
    assert [step for step, _ in shelf.failures(run.folder / "checkpoint")] == [4, 6]
    assert run.status["outcome"] == "failed"
    # With the disk repaired, the same command goes on.
    repaired = jobs.start(tmp_path / "run", ranks=2).succeed()
    assert f"Loading the checkpoint from {run.folder}/checkpoint/step-2." in repaired.output()
    assert jobs.complete_steps(repaired) == [2, 4, 6]


def test_a_read_only_file_system_is_a_failed_save_like_any_other(tmp_path: Path) -> None:
    run = jobs.start(tmp_path / "run", "resilience.max_failed_saves", 1, point="read_only", step=4)
    assert run.wait() == [1], run.tail()
    assert "[Errno 30] Read-only file system. 1 in a row have failed" in run.output()
    assert jobs.complete_steps(run) == [2]
    assert jobs.leftovers(run) == []
