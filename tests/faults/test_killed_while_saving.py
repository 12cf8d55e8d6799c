"""C1: killed at any point of a save, a run goes on from the newest complete checkpoint, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import jobs
from tests.integration import runs

pytestmark = pytest.mark.slow

# Killed in the checkpoint of step 4, after that of step 2; the purge comes with that of step 6.
CASES = {
    "kill_in_write": (4, [2]),
    "kill_before_manifest": (4, [2]),
    "kill_before_rename": (4, [2]),
    "kill_after_rename": (4, [2, 4]),
    "kill_in_purge": (6, [4, 6]),
}
KEPT = ("checkpoint.keep_latest_k", 2, "training.steps", 8, "resilience.keep_best", 0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """The same run, never interrupted."""
    return jobs.start(tmp_path_factory.mktemp("whole") / "run", *KEPT).succeed()


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("point", CASES)
def test_a_killed_run_goes_on_from_the_newest_complete_checkpoint(
    point: str, mode: str, tmp_path: Path, whole: runs.Run
) -> None:
    step, complete = CASES[point]
    settings = (*KEPT, "checkpoint.async_mode", mode)
    killed = jobs.start(tmp_path / "run", *settings, point=point, step=step)
    assert killed.wait() == [-9], killed.tail()
    assert (killed.folder / "planted").exists()
    assert jobs.complete_steps(killed) == complete
    resumed = jobs.start(tmp_path / "run", *settings).succeed()
    assert f"Loading the checkpoint from {resumed.folder}/checkpoint/step-{complete[-1]}." in resumed.output()
    assert jobs.complete_steps(resumed) == [6, 8]
    assert jobs.leftovers(resumed) == []
    assert jobs.journal(resumed) == jobs.journal(whole)
    assert resumed.status["outcome"] == "done"
