"""`titan-rl check` on a user's own loss: a right one passes, each planted fault ends with exit code 1."""

import importlib
import os
import re
from pathlib import Path

import pytest

from tests.integration import runs
from titan_rl import cli
from titan_rl.tools.check import worker

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "train_configs" / "tiny_grpo.toml"


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TITAN_RL_DEVICE", "cpu")


@pytest.fixture
def forked_ranks(monkeypatch):
    """Ranks forked from a process with all imports done, in place of torchrun's: they take 10 s less."""
    command = importlib.import_module("titan_rl.tools.check.command")

    def launch(directory, world_size):
        runs.fork(_rank, str(directory), folder=directory / "ranks", ranks=world_size).succeed()

    monkeypatch.setattr(command, "_launch", launch)


def _rank(directory, rank):
    assert int(os.environ["RANK"]) == rank
    worker.run(Path(directory) / "job.json")


def check(capsys, *overrides, config=CONFIG):
    """Exit code, and what the comparisons that differ are about."""
    code = cli.main(["check", str(config), *overrides])
    printed = capsys.readouterr().out
    about = re.findall(r"^(micro-batches|rows|data parallel|layout) .* DIFFERS ", printed, re.MULTILINE)
    assert ("equal within" in printed) == (code == 0)
    return code, set(about), printed


def check_loss(capsys, name):
    return check(capsys, "--loss.aggregation.type", f"tests.integration.faulty_losses:{name}")


def test_a_right_loss_passes(capsys):
    code, about, printed = check_loss(capsys, "Right")
    assert (code, about) == (0, set())
    for kind in ("micro-batches", "rows", "data parallel", "layout"):
        assert re.search(rf"^{kind} .* equal$", printed, re.MULTILINE)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("name", "shown_by"),
    [
        ("MeanOfTheMicroBatch", {"micro-batches", "rows", "data parallel", "layout"}),
        ("CountOfTheRank", {"data parallel", "layout"}),
        ("TermWithoutMask", {"rows", "layout"}),
        ("MeanOfTheRow", {"rows", "layout"}),
    ],
)
def test_a_planted_fault_is_found_by_the_comparison_that_shows_it(capsys, name, shown_by):
    code, about, _ = check_loss(capsys, name)
    assert code == 1
    assert shown_by <= about


@pytest.mark.usefixtures("forked_ranks")
def test_two_axes_run_on_four_ranks_and_alone(capsys):
    code, _, printed = check(
        capsys,
        "--model.name=llama3",  # not tied, as a pipeline asks
        "--model.flavor=debugmodel",
        "--parallelism.tensor_parallel_degree=4",
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.data_parallel_shard_degree=1",
        "--training.local_batch_size=2",
    )
    assert code == 0
    for title in ("tensor 2", "pipeline 2", "tensor 2 x pipeline 2"):
        assert f"layout         {title} " in printed
    assert "tensor_parallel_degree = 4: each is 2 here" in printed


@pytest.mark.nightly
def test_hsdp_and_a_loss_of_whole_sequences(capsys):
    """GSPO's ratio is of a sequence; the copies of the model and the shards of each are axes of their own."""
    code, _, printed = check(
        capsys, "--algorithm.type=gspo", "--parallelism.data_parallel_replicate_degree=2"
    )
    assert code == 0
    for title in ("replicate 2", "shard 2", "replicate 2 x shard 2"):
        assert f"layout         {title} " in printed


@pytest.mark.nightly
def test_a_teacher_needs_no_weights_to_be_checked(capsys):
    code, _, printed = check(
        capsys,
        "--teacher.divergence=forward",
        "--parallelism.context_parallel_degree=2",
        config=ROOT / "train_configs" / "tiny_distillation.toml",
    )
    assert code == 0
    assert "layout         shard 2 x context 2 " in printed
