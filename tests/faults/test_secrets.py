"""S2: what stands in the environment stays there, whatever happens to the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import jobs
from tests.integration import runs

pytestmark = pytest.mark.slow

SECRETS = {
    "HF_TOKEN": "canary-hf",
    "WANDB_API_KEY": "canary-wandb",
    "AWS_SECRET_ACCESS_KEY": "canary-aws",
    "AZURE_CLIENT_SECRET": "canary-azure",
    "SERVICE_PASSWORD": "canary-password",
    "GOOGLE_APPLICATION_CREDENTIALS": "canary-google",
}
HARMLESS = "canary-harmless"


def files_with(text: str, run: runs.Run) -> list[str]:
    paths = [path for path in run.folder.rglob("*") if path.is_file()]
    return [path.name for path in [run.log, *paths] if text.encode() in path.read_bytes()]


def test_no_credential_reaches_a_file_or_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails, hangs until its stacks are dumped, skips a bad step and saves."""
    for name, value in (SECRETS | {"TITAN_RL_TEST": HARMLESS}).items():
        monkeypatch.setitem(runs._ENVIRONMENT, name, value)
    settings = ("reward", '[{type = "tests.faults.leaky_reward:tells_its_environment"}]')
    settings += ("checkpoint.interval", 1, "batching.skip_zero_advantages", "false")
    settings += ("resilience.watchdog.train_seconds", 15)

    def start(point: str, step: int) -> runs.Run:
        return jobs.start(tmp_path / "run", *settings, ranks=2, point=point, step=step, rank=-1)

    run = start("raise_in_training", 3)
    assert run.wait(120) == [1, 1], run.tail()
    run = start("hang_in_three_ways", 4)
    assert run.wait(120) == [-9, -9], run.tail()
    run = start("bad_steps", 6).succeed()
    assert "planted in the optimiser step" in run.output()
    assert "Watchdog: stacks of rank 0" in run.output()
    assert list((run.folder / "bad_steps").iterdir())
    # Of the environment a harmless part is found: what is looked for would be found too.
    assert any(name.startswith("train-") for name in files_with(HARMLESS, run))
    assert [(value, files_with(value, run)) for value in SECRETS.values() if files_with(value, run)] == []
