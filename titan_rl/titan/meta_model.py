"""A model sharded over ranks that do not exist: how large each rank's part of it is.

TorchTitan's fake backend stands in for the process group and every tensor is on the meta device, so that a
70B model on 4,096 ranks takes seconds and no memory. Nothing is ever given storage.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import get_spmd_backend, init_fake_mode, set_spmd_backend
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils as titan_utils

from titan_rl.errors import ConfigError
from titan_rl.titan.models import local


@dataclass(frozen=True, slots=True)
class ShardSize:
    """One parameter.

    Attributes:
        name: TorchTitan's.
        numel: Its numbers over all ranks.
        local_numel: Numbers of the largest shard, which is rank 0's.
    """

    name: str
    numel: int
    local_numel: int


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """Sizes of one model under a layout without pipeline parallelism.

    Attributes:
        parameters: In the model's order; a tied matrix stands once.
        buffer_bytes: Of each rank, by module prefix (``layers.0``, ...): buffers are not sharded.
        flops_per_token: TorchTitan's estimate of a forward and backward pass at ``training.seq_len``.
    """

    parameters: tuple[ShardSize, ...]
    buffer_bytes: dict[str, int]
    flops_per_token: int

    @property
    def numel(self) -> int:
        """Parameters of the whole model."""
        return sum(parameter.numel for parameter in self.parameters)


def shard_on_meta(config: Any, spec: ModelSpec, *, world_size: int) -> ShardedModel:
    """Build a model as a run of ``world_size`` ranks would shard it, and measure rank 0's part.

    Pipeline parallelism is left out: stages are whole layers, which the caller counts, and each layer is
    sharded over ``world_size / pipeline_parallel_degree`` ranks either way.

    Args:
        config: A trainer's configuration whose layout has no contradictions; it stays as it is.
        spec: The model; it stays as it is.
        world_size: Ranks of the run.

    Raises:
        ConfigError: TorchTitan refuses the model under this layout.
        RuntimeError: this process is already a rank of a run.
    """
    if dist.is_initialized():
        raise RuntimeError("A plan needs a process without a process group; got one that is a rank.")
    pipeline = config.parallelism.pipeline_parallel_degree
    config = dataclasses.replace(
        config,
        model_spec=dataclasses.replace(spec, model=copy.deepcopy(spec.model)),
        parallelism=dataclasses.replace(config.parallelism, pipeline_parallel_degree=1),
        training=dataclasses.replace(config.training, enable_cpu_offload=False),
    )
    backend = get_spmd_backend()
    # DTensor remembers results with the mesh of the first plan of this layout in this process.
    _clear_sharding_prop_cache()
    init_fake_mode(world_size // pipeline)
    try:
        return _measure(config, world_size // pipeline)
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise ConfigError(
            "[parallelism]",
            "be a layout that TorchTitan can build this model with",
            f"{spec.name} {spec.flavor} on {world_size} ranks",
            f"TorchTitan said: {str(error).strip() or repr(error)}",
        ) from error
    finally:
        set_spmd_backend(backend)
        _clear_sharding_prop_cache()
        dist.destroy_process_group()


def _measure(config: Any, world_size: int) -> ShardedModel:
    dims = ParallelDims.from_config(config.parallelism, world_size)
    dims.build_mesh()
    set_spmd_backend(config.parallelism.spmd_backend)
    spec, training = cast(ModelSpec, config.model_spec), config.training
    spec.model.update_from_config(config=config)
    with torch.device("meta"), titan_utils.set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
        model: Any = spec.model.build()
    _, flops = spec.model.get_nparams_and_flops(model, training.seq_len)
    whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder=config.dump_folder,
    )
    # Until its weights are initialised, a tied matrix may stand under both of its names here.
    parameters = tuple(
        ShardSize(name, whole[name], local(parameter).numel())
        for name, parameter in model.named_parameters()
        if name in whole
    )
    buffers: dict[str, int] = {}
    for name, buffer in model.named_buffers():
        unit = unit_of(name)
        buffers[unit] = buffers.get(unit, 0) + buffer.numel() * buffer.element_size()
    return ShardedModel(parameters, buffers, flops)


def unit_of(name: str) -> str:
    """The part of a decoder that a parameter belongs to: a layer, or a module beside the layers.

    >>> unit_of("layers.3.attention.wo.weight"), unit_of("lm_head.weight")
    ('layers.3', 'lm_head')
    """
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
