"""Names of the memory that tensor-parallel ranks share, with a stand-in for the module of vLLM."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

NAME = "titan_rl.generation.vllm_shared_memory"
PACKAGES = ("vllm", "vllm.distributed", "vllm.distributed.device_communicators")


class _CPUSHMDistributed:
    @staticmethod
    def make_group_name(communicator: Any) -> str:
        return "the same in every launch"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    stand_in = SimpleNamespace(_CPUSHMDistributed=_CPUSHMDistributed)
    sys.modules[PACKAGES[-1]].cpu_communicator = stand_in  # pyrefly: ignore[missing-attribute]
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    module = importlib.import_module(NAME)
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(_CPUSHMDistributed, "make_group_name", _CPUSHMDistributed.make_group_name)
    module.name_after_launch()
    yield module
    del sys.modules[NAME]


def name(rank: int, ranks: tuple[int, ...] = (0, 1), unique_name: str = "tp:0") -> str:
    communicator = SimpleNamespace(rank=rank, ranks=ranks, unique_name=unique_name)
    return _CPUSHMDistributed.make_group_name(communicator)


def test_all_ranks_of_a_group_agree_and_no_other_group_has_its_name(module: ModuleType) -> None:
    assert name(0) == name(1)
    assert len({name(0), name(2, ranks=(2, 3)), name(0, unique_name="dp:0")}) == 3
    assert "/" not in name(0)


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"])
def test_another_launch_has_other_names(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    before = name(0)
    monkeypatch.setenv(variable, "other/one")
    assert name(0) != before
    assert "/" not in name(0)


def test_what_was_left_under_the_own_name_goes_before_and_what_was_made_goes_after(
    module: ModuleType, tmp_path: Path
) -> None:
    mine, neighbours = tmp_path / f"{name(0)}_0", tmp_path / f"{name(0)}_1"
    mine.touch()
    neighbours.touch()
    name(0)
    assert not mine.exists()
    mine.touch()  # as vLLM makes it
    module.remove_names()
    assert (mine.exists(), neighbours.exists()) == (False, True)
    module.remove_names()
