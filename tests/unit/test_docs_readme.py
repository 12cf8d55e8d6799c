"""README.md: its files are accepted, its reward scores what the text says, its commands and recipes exist."""

import re
import shlex
from pathlib import Path

import pytest

from tests.unit.rewards.reward_cases import make_rollout
from titan_rl import cli
from titan_rl.config.entry import read_checked
from titan_rl.rewards.spec import RewardSpec, WeightedSum
from titan_rl.trainers.configuration import configure

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def blocks(language):
    return [body for name, body in FENCED if name == language]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with the files that a reader of the README has there."""
    run, mine = blocks("toml")
    (rewards,) = blocks("python")
    (tmp_path / "run.toml").write_text(run)
    (tmp_path / "mine.toml").write_text(mine)
    (tmp_path / "my_rewards.py").write_text(rewards)
    (tmp_path / "train_configs").symlink_to(ROOT / "train_configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")
    return tmp_path


@pytest.fixture
def smollm2(folder):
    """The model of the first file: its own tokenizer is not there before it is prepared."""
    (folder / "models").mkdir()
    (folder / "models" / "smollm2-135m").symlink_to(ROOT / "titan_rl" / "assets" / "tiny_llama")
    return ("--model.name", "llama3", "--model.flavor", "debugmodel")


def test_the_first_file_is_accepted(smollm2):
    assert cli.main(["validate", "run.toml", *smollm2, "--world-size", "2", "--data"]) == 0


def test_the_file_with_an_own_reward_is_accepted_and_scores_as_the_text_says(folder):
    initial_weights = ("--checkpoint.initial_load_path", "none", "--model.allow_random_init")
    assert cli.main(["validate", "mine.toml", *initial_weights, "--data"]) == 0
    config = configure(*read_checked("mine.toml", []))
    assert config.dump_folder == "outputs/mine"
    assert config.evaluation.pass_threshold == 0.9
    score = WeightedSum([RewardSpec.from_table(table) for table in config.reward])
    assert score(make_rollout("42", answer="42")).total == pytest.approx(0.98)
    assert score(make_rollout("427", answer="42")).total == pytest.approx(-0.03)


def test_every_command_and_every_file_that_a_command_names_exists(folder):
    commands = "".join(blocks(""))
    shown = [line.partition("  #")[0].strip() for line in commands.splitlines()]
    subcommands = {line.split()[1] for line in shown if line.startswith("titan-rl ")}
    assert {"validate", "plan", "check", "checkpoints", "export"} <= subcommands
    for name in subcommands:
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
    targets = {word for line in shown if line.startswith("make ") for word in shlex.split(line)[1:]}
    makefile = (ROOT / "Makefile").read_text()
    assert targets >= {"quickstart", "test"}
    assert {target for target in targets if f"\n{target}:" not in makefile} == set()
    files = set(re.findall(r"[\w/.]+\.toml", commands))
    assert {name for name in files if not (ROOT / name).exists() and not (folder / name).exists()} == set()
