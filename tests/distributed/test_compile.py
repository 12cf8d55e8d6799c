"""A step of GRPO and of PPO with compiled layers and loss, under every way of activation checkpointing.

Against the plain model, on one rank, with inductor; PPO's gradients are the policy's and the critic's.
"Equal", in fp32: as steps.py has it. Compiling takes minutes: `make nightly`.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.distributed import algorithms_worker, compile_worker
from tests.distributed.compile_worker import CHECKPOINTING, NAMES, PLAIN
from tests.distributed.steps import Step, check_equal
from tests.integration import runs
from titan_rl.titan import device

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("compiled")
    algorithms_worker.write_model(directory, initializer_range=0.15)
    compute(directory, PLAIN)
    return directory


def compute(directory: Path, way: str) -> None:
    # A process that was killed may have left half a library in the cache that all share.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor")}
    folder = directory / way.replace(", ", "_")
    runs.fork(_rank, str(directory), way, folder=folder, environment=cache).succeed(1200)


def _rank(directory: str, way: str, rank: int) -> None:
    device.install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store.{way}", rank=rank, world_size=1)
    compile_worker.run(Path(directory), way)
    dist.destroy_process_group()


def read(directory: Path, way: str) -> tuple[dict, dict[str, Step]]:
    rest = json.loads((directory / f"{way}.json").read_text())
    tensors = load_file(directory / f"{way}.safetensors")
    steps = {}
    for name in NAMES:
        gradients = {k.removeprefix(f"{name}/"): v for k, v in tensors.items() if k.startswith(f"{name}/")}
        assert any(key.startswith("critic.") for key in gradients) == (name == "ppo")
        steps[name] = Step(**rest[name], gradients=gradients)
    return rest, steps


@pytest.mark.parametrize("way", [way for way in CHECKPOINTING if way != PLAIN])
def test_compiling_changes_neither_loss_nor_gradients(directory, way):
    compute(directory, way)
    rest, steps = read(directory, way)
    plain, expected = read(directory, PLAIN)
    assert rest["num_graphs"] > 0
    assert plain["num_graphs"] == 0
    assert (rest["num_wrapped"] > 0) == (way in ("compiled, selective", "compiled, full"))
    assert (rest["budget"] < 1.0) == (way == "compiled, memory budget")
    for name in NAMES:
        check_equal(steps[name], expected[name])
