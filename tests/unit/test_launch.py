"""The launcher whose ranks are forked: what it hands to torchrun. No rank is started."""

import multiprocessing
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from titan_rl import launch

RECIPE = Path(__file__).parents[2] / "titan_rl" / "train_configs" / "tiny_grpo.toml"


@pytest.fixture
def handed(monkeypatch):
    """What torchrun and the fork server were given."""
    found = {}
    monkeypatch.setattr(torchrun, "run", lambda options: found.update(options=options))
    monkeypatch.setattr(
        multiprocessing, "set_forkserver_preload", lambda modules: found.update(preload=modules)
    )
    return found


def test_torchruns_options_stay_and_the_ranks_are_forked(handed):
    given = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts=5",
        str(RECIPE),
        "--training.steps",
        "3",
    ]
    assert launch.launch(given) == 0
    options = handed["options"]
    assert (options.standalone, options.nproc_per_node, options.max_restarts) == (True, "2", 5)
    assert (options.run_path, options.start_method) == (True, "forkserver")
    assert Path(options.training_script) == Path(launch.__file__).with_name("train.py")
    assert options.training_script_args == [str(RECIPE), "--training.steps", "3"]


@pytest.mark.parametrize(("generator", "is_vllm"), [("vllm", True), ("local", False)])
def test_vllm_is_imported_beforehand_where_it_is_the_generator(handed, generator, is_vllm):
    launch.launch([str(RECIPE), "--generator.type", generator])
    assert "titan_rl.trainers.session" in handed["preload"]
    assert ("titan_rl.generation.vllm_preload" in handed["preload"]) == is_vllm


def test_a_mistake_in_the_configuration_starts_nothing(handed, capsys):
    assert launch.launch([str(RECIPE), "--training.stps", "3"]) == 2
    assert not handed
    assert "Did you mean 'steps'?" in capsys.readouterr().err


def test_what_is_started_is_not_the_users_choice(handed, capsys):
    assert launch.launch(["-m", "titan_rl.train", str(RECIPE)]) == 2
    assert not handed
    assert "--module must be left out" in capsys.readouterr().err
