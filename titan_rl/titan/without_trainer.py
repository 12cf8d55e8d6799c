"""A rank of a run without TorchTitan's trainer: what models are built and run with, and nothing else.

For tools that compute one step on a CPU: no optimiser, no checkpoints, no data. The process group is theirs
for a while, so that a process can be a rank of several worlds, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import get_spmd_backend, get_spmd_context, set_spmd_backend


class TrainerParts(SimpleNamespace):
    """The attributes of a TorchTitan trainer that :mod:`titan_rl.titan.models` reads."""


def trainer_parts(config: Any) -> TrainerParts:
    """Make the mesh of a layout over all ranks of this world, before any model. Collective.

    Args:
        config: A trainer's configuration with ``model_spec``, whose model is changed.
    """
    # DTensor remembers results with the mesh of an earlier layout of this process.
    _clear_sharding_prop_cache()
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    dims.build_mesh()
    set_spmd_backend(config.parallelism.spmd_backend)
    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    return TrainerParts(
        config=config,
        parallel_dims=dims,
        model_config=model_config,
        device=torch.device("cpu"),
        train_context=get_spmd_context(parallel_dims=dims),
    )


@contextmanager
def gloo_world(store: Path, *, rank: int, world_size: int) -> Iterator[None]:
    """Be a rank of a world of gloo ranks, and leave it as it was found.

    Args:
        store: A file that does not exist yet, the same on all its ranks.
        rank: This process's.
        world_size: Ranks of it.
    """
    backend = get_spmd_backend()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        set_spmd_backend(backend)
        _clear_sharding_prop_cache()
