"""What sharded models read of a trainer: of none at all, and of one rank of FSDP."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from titan_rl.titan.attention import use_cpu_attention
from titan_rl.titan.hf_config import spec_from_hf
from titan_rl.titan.sharded_model import ShardedModel


def no_parallelism(context: Callable[[], AbstractContextManager[None]] = nullcontext) -> Any:
    """What a sharded model reads of a trainer on one rank, where nothing is sharded or annotated.

    Args:
        context: Entered for every micro-batch.
    """
    return SimpleNamespace(
        config=SimpleNamespace(
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor"), training=TrainingConfig()
        ),
        parallel_dims=SimpleNamespace(get_optional_mesh=lambda axis: None, ep_enabled=False),
        device=torch.device("cpu"),
        train_context=context,
    )


def one_part(
    module: nn.Module, *, context: Callable[[], AbstractContextManager[None]] = nullcontext
) -> ShardedModel:
    """A plain module on one rank.

    Args:
        module: Called with token ids and ``positions``, and with masks when it is a decoder of TorchTitan's;
            it has an ``lm_head``, which may be None.
        context: As for :func:`no_parallelism`.
    """
    config = getattr(module, "config", SimpleNamespace(first_attention=None))
    return ShardedModel(no_parallelism(context), [module], config)


def one_rank(directory: Path, **training: Any) -> SimpleNamespace:
    """The attributes of a trainer of which models are built, on one rank of FSDP. Needs a process group.

    Args:
        directory: The policy, in Hugging Face layout.
        training: ``[training]``; computes in float32 by default.
    """
    parallelism = ParallelismConfig()
    dims = ParallelDims.from_config(parallelism, 1)
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    spec = spec_from_hf(directory)
    use_cpu_attention(spec.model)
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    return SimpleNamespace(
        config=SimpleNamespace(
            model_spec=spec,
            training=TrainingConfig(**({"mixed_precision_param": "float32"} | training)),
            parallelism=parallelism,
            compile=CompileConfig(enable=False),
            activation_checkpoint=None,
            dump_folder="",
        ),
        parallel_dims=dims,
        model_config=spec.model,
        device=torch.device("cpu"),
        train_context=dist_utils.get_spmd_context(parallel_dims=dims),
    )
