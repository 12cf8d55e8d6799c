"""Settings of all tests, and what several directories share: one pretrained tiny model per session."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.integration import runs

# A busy machine is no failure of the code: examples are not timed.
settings.register_profile("titan_rl", deadline=None)
settings.load_profile("titan_rl")


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """TorchTitan's own trainer on sums whose digits come in either order: weak, but a model."""
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    run = runs.torchrun(runs.CONFIGS / "pretrain.toml", folder=folder)
    runs.warm_up()
    return run.succeed()


@pytest.fixture(scope="session")
def initial_load_path(pretrained: runs.Run) -> Path:
    """The pretrained model's checkpoint."""
    (checkpoint,) = (pretrained.folder / "checkpoint").iterdir()
    return checkpoint
