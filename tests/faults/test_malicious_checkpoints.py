"""S1: code in a checkpoint is not executed, whether a manifest vouches for it or none does."""

from __future__ import annotations

import dataclasses
import io
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from tests.faults import jobs
from tests.integration import runs
from titan_rl.resilience import manifest as manifests

pytestmark = pytest.mark.slow


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, (f"open({str(self.canary)!r}, 'w').close()",)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    return jobs.start(tmp_path_factory.mktemp("saved") / "run").succeed()


def in_metadata(directory: Path, canary: Path) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(Bomb(canary)))


def in_a_byte_entry(directory: Path, canary: Path) -> None:
    """A value of the schedule is replaced in its shard, and its place and length in ``.metadata`` with it."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    (index,) = [i for i in metadata.storage_data if i.fqn == "lr_scheduler.last_epoch"]
    buffer = io.BytesIO()
    torch.save(Bomb(canary), buffer)
    info = metadata.storage_data[index]
    shard = directory / info.relative_path
    offset = shard.stat().st_size
    with shard.open("ab") as stream:
        stream.write(buffer.getvalue())
    metadata.storage_data[index] = dataclasses.replace(info, offset=offset, length=len(buffer.getvalue()))
    path.write_bytes(pickle.dumps(metadata))


def vouch_for(directory: Path) -> None:
    """Whoever can write a checkpoint can write a manifest."""
    old = manifests.read(directory)
    files = {name: manifests.hash_file(directory / name) for name in old.files}
    manifests.write(directory, dataclasses.replace(old, files=files))


@pytest.mark.parametrize("plant", [in_metadata, in_a_byte_entry])
def test_the_bombs_go_off_under_plain_dcp(plant: object, saved: runs.Run, tmp_path: Path) -> None:
    """Or else the tests below show nothing."""
    canary = tmp_path / "canary"
    directory = shutil.copytree(saved.folder / "checkpoint" / "step-6", tmp_path / "step-6")
    plant(directory, canary)
    runs.forked(load_with_dcp, str(directory))
    assert canary.exists()


def load_with_dcp(directory: str) -> None:
    import torch.distributed.checkpoint as dcp

    try:
        dcp.load({"lr_scheduler": {"last_epoch": 0}}, checkpoint_id=directory, no_dist=True)
    except BaseException as error:
        print("expected:", error)


@pytest.mark.parametrize("plant", [in_metadata, in_a_byte_entry])
def test_a_checkpoint_with_code_is_refused_and_the_code_not_run(
    plant: object, saved: runs.Run, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    folder = shutil.copytree(saved.folder, tmp_path / "run")
    plant(folder / "checkpoint" / "step-6", canary)
    vouch_for(folder / "checkpoint" / "step-6")
    run = jobs.start(folder, "training.steps", 8)
    assert run.wait() == [2], run.tail()
    assert not canary.exists()
    assert "Traceback" not in run.output()
    assert "eval" in run.output() or "Weights only load failed" in run.output()


def test_initial_weights_with_code_are_refused_and_the_code_not_run(saved: runs.Run, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    directory = shutil.copytree(saved.folder / "checkpoint" / "step-6", tmp_path / "step-6")
    in_metadata(directory, canary)
    run = jobs.start(tmp_path / "run", "checkpoint.initial_load_path", directory)
    assert run.wait() == [2], run.tail()
    assert not canary.exists()
    assert "checkpoint.initial_load_path must be a TorchTitan checkpoint of this model" in run.output()
