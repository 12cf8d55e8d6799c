"""A computation on gloo ranks, and the same in this process as the only rank.

What is computed is the function ``run(directory)`` of a worker, a module of this directory; it leaves files.
The ranks are forked from a process that has imported torch and TorchTitan, as those of
:func:`tests.integration.runs.start`: importing would take longer than computing.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torchtitan.distributed import utils as dist_utils

from tests.integration import runs
from titan_rl.titan import device


def compute(worker: ModuleType, directory: Path) -> None:
    """Run a worker on two ranks, then on one."""
    on_ranks(worker, directory, 2)
    with only_rank(directory):
        worker.run(directory)


def write(directory: Path, report: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Leave what this rank found: ``world<N>.rank<R>.json``, and of rank 0 ``world<N>.safetensors``."""
    stem = directory / f"world{dist.get_world_size()}"
    Path(f"{stem}.rank{dist.get_rank()}.json").write_text(json.dumps(report))
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{stem}.safetensors")


def read(directory: Path, ranks: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The reports of so many ranks, in their order, and rank 0's tensors."""
    reports = [(directory / f"world{ranks}.rank{rank}.json").read_text() for rank in range(ranks)]
    return [json.loads(report) for report in reports], load_file(directory / f"world{ranks}.safetensors")


def results(directory: Path) -> SimpleNamespace:
    """What :func:`compute` left: reports of ``one`` and ``two`` ranks, tensors ``alone`` and ``sharded``."""
    (one,), alone = read(directory, 1)
    two, sharded = read(directory, 2)
    return SimpleNamespace(one=one, two=two, alone=alone, sharded=sharded)


def on_ranks(worker: ModuleType, directory: Path, ranks: int) -> None:
    """Run a worker in so many forked processes."""
    arguments = (worker.__name__, str(directory), ranks)
    runs.fork(_rank, *arguments, folder=directory / f"ranks{ranks}", ranks=ranks).succeed()


@contextmanager
def only_rank(directory: Path) -> Iterator[None]:
    """This process as the only rank, on one thread; afterwards it is as before."""
    device.install()
    backend, threads = dist_utils.get_spmd_backend(), torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store.1", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()
        dist_utils.set_spmd_backend(backend)
        torch.set_num_threads(threads)


def _forget_meshes() -> None:
    # Imported late: a worker looks at TorchTitan as it is before device.install().
    importlib.import_module("tests.distributed.fsdp_worker").parallel_dims.cache_clear()


def _rank(worker: str, directory: str, ranks: int, rank: int) -> None:
    module = importlib.import_module(worker)  # before device.install(), which fsdp_worker undoes
    device.install()
    torch.set_num_threads(1)
    store = f"file://{directory}/store.{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    module.run(Path(directory))
    dist.destroy_process_group()
