"""Random initialisation of sharded models on a CPU.

A CPU mesh has no random-number tracker for sharded tensors, so TorchTitan 0.3.0 would run each
initialiser on every rank's shard with the same seed: all shards equal, rows of the embedding repeated
world-size times. Here each parameter is drawn as a whole, identically on all ranks, and every rank
keeps its slice. A model therefore starts from the same values on any number of ranks.
"""

import types
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate


def install(titan_module: types.ModuleType) -> None:
    """Replace the step of TorchTitan's ``Module`` that initialises a module's own parameters.

    Args:
        titan_module: The module ``torchtitan.protocols.module``.
    """
    original = titan_module.Module._init_self_parameters

    def init_self_parameters(self: Any) -> None:
        sharded = {name: p for name, p in self._parameters.items() if _is_sharded_on_cpu(p)}
        for name, parameter in sharded.items():
            whole = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
            self._parameters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        try:
            original(self)
        finally:
            drawn = {name: self._parameters[name].detach() for name in sharded}
            self._parameters.update(sharded)
        for name, parameter in sharded.items():
            if not drawn[name].isnan().all():  # else it is left to another module, as tied weights are
                copy_full(parameter, drawn[name])

    titan_module.Module._init_self_parameters = init_self_parameters


def _is_sharded_on_cpu(parameter: nn.Parameter | None) -> bool:
    return (
        isinstance(parameter, DTensor)
        and parameter.device_mesh.device_type == "cpu"
        and parameter.device_mesh.size() > 1
    )


@torch.no_grad()
def copy_full(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a full tensor that every rank holds into a parameter, sharded or not, without communication.

    Args:
        parameter: The destination, any shape; a ``DTensor`` of any placement, or a plain tensor.
        full: The whole value, of the parameter's global shape.
    """
    if isinstance(parameter, DTensor):
        # Not in place on the whole: DTensor refuses to where a dimension is shorter than its mesh.
        shard = replicated(full, like=parameter).redistribute(placements=parameter.placements)
        parameter.to_local().copy_(shard.to_local())
    else:
        parameter.copy_(full)


def replicated(full: torch.Tensor, *, like: DTensor) -> DTensor:
    """A tensor that every rank holds whole, as a ``DTensor`` on the mesh and device of another."""
    mesh = like.device_mesh
    local = full.to(device=mesh.device_type, dtype=like.dtype)
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
