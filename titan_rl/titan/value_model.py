"""A decoder that gives one number per token: the critic of PPO, and a reward model.

It is the policy's architecture with a scalar head, built by TorchTitan under the policy's parallelism. What
trains it is elsewhere: :mod:`titan_rl.policy.critic` for PPO.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_param_placement
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.sharding import ShardingConfig

from titan_rl.errors import ConfigError
from titan_rl.titan import safe_reading
from titan_rl.titan.checkpoint_errors import CHECKPOINT_ERRORS, cause_of
from titan_rl.titan.init import copy_full
from titan_rl.titan.models import build_sharded
from titan_rl.titan.sharded_model import ShardedModel
from titan_rl.titan.state import local

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
        """Replicate it under tensor parallelism: one output row cannot be cut."""
        # TorchTitan's decoders have given it a vocabulary's layout: replicated input, sharded output.
        vocabulary: Any = self._sharding_config
        if vocabulary is not None:
            # All ranks compute the same values and loss: "invariant", so that gradients are not added up.
            invariant = dense_activation_placement(tp=spmd.I)
            self._sharding_config = ShardingConfig(
                state_shardings={name: dense_param_placement(tp=spmd.I) for name in ("weight", "bias")},
                in_src_shardings={"input": dense_activation_placement(tp=spmd.R)},
                in_dst_shardings={"input": invariant},
                out_src_shardings=invariant,
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
    trainer: Trainer,
    spec: ModelSpec,
    model_config: BaseModel.Config,
    *,
    ac_config: Any = None,
    head_bias: bool = False,
) -> ShardedModel:
    """Build a value model beside the policy. Its head is zero, its other weights are random.

    It gives ``[B, T, 1]`` fp32, its head applied.

    Args:
        trainer: A TorchTitan trainer after its ``__init__``.
        spec: How the architecture is parallelised.
        model_config: Of a decoder, after ``update_from_config``; it stays as it is.
        ac_config: Activation checkpointing, or None.
        head_bias: Whether the head has a bias.
    """
    config = value_config(model_config, head_bias=head_bias)
    return build_sharded(trainer, spec, config, ac_config=ac_config)


def value_sibling(trainer: Trainer, policy: ShardedModel, *, head_bias: bool = False) -> ShardedModel:
    """Build a trainable value model like the policy, with the policy's backbone and a head of zeros.

    Args:
        trainer: A TorchTitan trainer after its ``__init__``.
        policy: Its model.
        head_bias: Whether the head has a bias.
    """
    config = trainer.config
    model = build_value_model(
        trainer,
        cast(ModelSpec, config.model_spec),
        trainer.model_config,
        ac_config=config.activation_checkpoint,
        head_bias=head_bias,
    )
    copy_backbone(policy, model)
    model.watch_routers()
    return model


@torch.no_grad()
def init_head(model: ShardedModel, *, std: float, seed: int) -> None:
    """Draw the head's weight from a normal distribution around 0, alike on all numbers of ranks; no bias.

    Args:
        model: A value model.
        std: Standard deviation; 0 makes every value 0.
        seed: Decides the draw.
    """
    head: Any = model.head
    if head is None:
        return
    generator = torch.Generator().manual_seed(seed)
    copy_full(head.weight, std * torch.randn(tuple(head.weight.shape), generator=generator))
    if head.bias is not None:
        local(head.bias).zero_()


@torch.no_grad()
def rescale_head(model: ShardedModel, *, factor: float, shift: float) -> None:
    """Change a head with a bias so that every value ``v`` becomes ``factor * v + shift``.

    Args:
        model: A value model.
        factor: Multiplies weight and bias.
        shift: Is then added to the bias.
    """
    head: Any = model.head
    if head is None:
        return
    local(head.weight).mul_(factor)
    local(head.bias).mul_(factor).add_(shift)


@torch.no_grad()
def copy_backbone(source: ShardedModel, target: ShardedModel) -> None:
    """Copy all weights and buffers but the head's, shard by shard.

    Args:
        source: The policy, or another value model, of the same architecture and parallelism.
        target: A value model.
    """
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (
            [
                tensor
                for part in model.parts
                for name, tensor in getattr(part, kind)()
                if "lm_head" not in name.split(".")
            ]
            for model in (target, source)
        )
        for to, of in zip(ours, theirs, strict=True):
            local(to).copy_(local(of))


def load_value_checkpoint(
    model: ShardedModel, path: str, *, where: str = "checkpoint.initial_load_path"
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
    state = model.state_dict()
    try:
        stored = safe_reading.read_metadata(path).state_dict_metadata
        head = stored.get(HEAD)
        has_head = isinstance(head, TensorStorageMetadata) and head.size[0] == 1
        absent = [HEAD, HEAD_BIAS] if not has_head else [HEAD_BIAS] if HEAD_BIAS not in stored else []
        for name in absent:
            state.pop(name, None)
        safe_reading.load(state, path)
    except CHECKPOINT_ERRORS as error:
        raise ConfigError(
            where,
            "be a TorchTitan checkpoint of a model of this architecture",
            path,
            f"Loading it failed: {cause_of(error)}.",
        ) from error
    model.load_state_dict(state, strict=False)  # what was loaded is complete but for the head
    return has_head
