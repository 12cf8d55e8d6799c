"""A decoder that gives one number per token: the critic of PPO, and a reward model.

It is the policy's architecture with a scalar head, built by TorchTitan under the policy's parallelism. What
trains it is elsewhere: :mod:`titan_rl.policy.critic` for PPO.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder_sharding import rowwise_config
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils as titan_utils

from titan_rl.errors import ConfigError
from titan_rl.titan import safe_reading
from titan_rl.titan.init import copy_full
from titan_rl.titan.models import local

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

HEAD = "lm_head.weight"
"""The scalar head's name in checkpoints, where a language model has its output projection."""
HEAD_BIAS = "lm_head.bias"


class ValueHead(Linear):
    """From the last hidden state to one number, in fp32 whatever the layers compute in.

    In bf16 a value of 100 would be rounded to a multiple of 0.5. A critic's head has a bias, with which it
    follows the mean of the returns at once; a reward model's has none, because differences alone matter.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """A linear layer's."""

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the input dimension under tensor parallelism: one output row cannot be cut."""
        # TorchTitan's decoders have given it a vocabulary's layout: replicated input, sharded output.
        vocabulary: Any = self._sharding_config
        if self.bias is not None and parallel_dims.tp_enabled:
            raise ConfigError(
                "parallelism.tensor_parallel_degree",
                "be 1 with a value head that has a bias, which every rank would add",
                parallel_dims.tp,
                "Shard over data-parallel ranks instead.",
            )
        if vocabulary is not None:
            self._sharding_config = dataclasses.replace(
                rowwise_config(),
                in_src_shardings=vocabulary.in_src_shardings,
                in_dst_shardings={"input": vocabulary.out_src_shardings},
            )
        super().parallelize(parallel_dims)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Values ``[..., 1]`` fp32 of hidden states ``[..., D]``."""
        values = F.linear(input.float(), self.weight.float())
        return values if self.bias is None else values + self.bias.float()


def value_config(model_config: BaseModel.Config, *, head_bias: bool = False) -> BaseModel.Config:
    """A copy of a decoder's configuration with a scalar head, which no embedding is tied to.

    Args:
        model_config: TorchTitan's configuration of a decoder; it stays as it is.
        head_bias: Whether the head has a bias.
    """
    config: Any = copy.deepcopy(model_config)
    if config.enable_weight_tying:
        # A tied embedding is initialised through the head.
        config.tok_embeddings.param_init = config.lm_head.param_init
        config.enable_weight_tying = False
    config.lm_head = ValueHead.Config(
        in_features=config.dim,
        out_features=1,
        bias=head_bias,
        param_init={"weight": nn.init.zeros_, "bias": nn.init.zeros_},
        sharding_config=config.lm_head.sharding_config,
    )
    return config


def value_spec(spec: ModelSpec) -> ModelSpec:
    """A model spec whose model has a scalar head, for a trainer that trains such a model.

    Args:
        spec: The policy's; it stays as it is.
    """
    return dataclasses.replace(spec, model=value_config(spec.model))


def build_value_model(
    spec: ModelSpec,
    model_config: BaseModel.Config,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any = None,
    dump_folder: str = "",
    head_bias: bool = False,
) -> nn.Module:
    """Build a value model, sharded, in training mode. Its head is zero, its other weights are random.

    ``model(tokens, **kwargs)`` gives ``[B, T, 1]`` fp32; :func:`token_values` drops the last dimension.

    Args:
        spec: How the policy's architecture is parallelised.
        model_config: The policy's configuration, after ``update_from_config``; it stays as it is.
        parallel_dims: The meshes of the run.
        training: TorchTitan's section: dtypes, CPU offload.
        parallelism: TorchTitan's section.
        compile_config: TorchTitan's section.
        ac_config: Activation checkpointing, or None.
        dump_folder: Of the run.
        head_bias: Whether the head has a bias.

    Raises:
        ConfigError: pipeline parallelism is on.
    """
    if getattr(parallel_dims, "pp_enabled", False):
        raise ConfigError(
            "parallelism.pipeline_parallel_degree",
            "be 1 with a value model, which is built whole",
            parallel_dims.pp,
            "Shard it over data-parallel ranks instead.",
        )
    with torch.device("meta"), titan_utils.set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
        model = value_config(model_config, head_bias=head_bias).build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        compile_config=compile_config,
        ac_config=ac_config,
        dump_folder=dump_folder,
    )
    offload = training.enable_cpu_offload
    model.to_empty(device="cpu" if offload else titan_utils.device_type)
    buffer_device = torch.device(titan_utils.device_type) if offload else None
    with torch.no_grad():
        cast(BaseModel, model).init_weights(buffer_device=buffer_device)
    return model.train()


def value_sibling(trainer: Trainer, *, head_bias: bool = False) -> nn.Module:
    """Build a trainable value model like the policy, with the policy's backbone and a head of zeros.

    Args:
        trainer: A TorchTitan trainer after its ``__init__``, without pipeline parallelism.
        head_bias: Whether the head has a bias.
    """
    config = trainer.config
    model = build_value_model(
        cast(ModelSpec, config.model_spec),
        trainer.model_config,
        parallel_dims=trainer.parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
        head_bias=head_bias,
    )
    copy_backbone(trainer.model_parts[0], model)
    return model


def token_values(model: nn.Module, inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Values ``[B, T]`` fp32: the one at ``t`` has seen tokens 0 to ``t`` of its document.

    Args:
        model: A value model.
        inputs: Token ids ``[B, T]``.
        kwargs: Positions and masks, as the policy's forward pass takes them.
    """
    return model(inputs, **kwargs).squeeze(-1)


@torch.no_grad()
def init_head(model: nn.Module, *, std: float, seed: int) -> None:
    """Draw the head's weight from a normal distribution around 0, alike on all numbers of ranks; no bias.

    Args:
        model: A value model.
        std: Standard deviation; 0 makes every value 0.
        seed: Decides the draw.
    """
    head: Any = model.lm_head
    generator = torch.Generator().manual_seed(seed)
    copy_full(head.weight, std * torch.randn(tuple(head.weight.shape), generator=generator))
    if head.bias is not None:
        local(head.bias).zero_()


@torch.no_grad()
def rescale_head(model: nn.Module, *, factor: float, shift: float) -> None:
    """Change a head with a bias so that every value ``v`` becomes ``factor * v + shift``.

    Args:
        model: A value model.
        factor: Multiplies weight and bias.
        shift: Is then added to the bias.
    """
    head: Any = model.lm_head
    local(head.weight).mul_(factor)
    local(head.bias).mul_(factor).add_(shift)


@torch.no_grad()
def copy_backbone(source: nn.Module, target: nn.Module) -> None:
    """Copy all weights and buffers but the head's, shard by shard.

    Args:
        source: The policy, or another value model, of the same architecture and parallelism.
        target: A value model.
    """
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (
            [tensor for name, tensor in getattr(model, kind)() if "lm_head" not in name.split(".")]
            for model in (target, source)
        )
        for to, of in zip(ours, theirs, strict=True):
            local(to).copy_(local(of))


def load_value_checkpoint(
    model: nn.Module, path: str, *, where: str = "checkpoint.initial_load_path"
) -> bool:
    """Load the model of a TorchTitan checkpoint: a value model's, or a language model's without its head.

    Collective. Any number of ranks may have written it. A bias that the checkpoint lacks stays as it is.

    Args:
        model: A value model.
        path: A ``step-N`` directory.
        where: The key that names the path, for errors.

    Returns:
        Whether the checkpoint had a scalar head; otherwise the head stays as it is.

    Raises:
        ConfigError: it is not a checkpoint, or another model's.
    """
    state = dict(model.state_dict())
    try:
        stored = safe_reading.read_metadata(path).state_dict_metadata
        head = stored.get(HEAD)
        shape = tuple(head.size) if isinstance(head, TensorStorageMetadata) else None
        has_head = shape == tuple(state[HEAD].shape)
        absent = [HEAD, HEAD_BIAS] if not has_head else [HEAD_BIAS] if HEAD_BIAS not in stored else []
        for name in absent:
            state.pop(name, None)
        safe_reading.load(state, path)
    except (Exception, CheckpointException) as error:  # DCP raises its own, which is no Exception, and others
        raise ConfigError(
            where,
            "be a TorchTitan checkpoint of a model of this architecture",
            path,
            f"Loading it failed: {(str(error).strip() or repr(error)).splitlines()[-1]}.",
        ) from error
    model.load_state_dict(state, strict=False)  # what was loaded is complete but for the head
    return has_head
