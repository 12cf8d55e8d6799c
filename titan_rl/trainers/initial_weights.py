"""The weights that a run starts from, and the frozen copy of them that serves as reference.

Both are the same on a first start and on a resume: the reference is the policy before the first step, so
the initial weights are loaded first and a checkpoint of the run itself is restored over the policy later.
With low-rank adapters the reference needs no copy: it is the policy without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titan_rl.errors import ConfigError
from titan_rl.titan.api import logger
from titan_rl.titan.models import build_sibling, copy_shards
from titan_rl.titan.sharded_model import ShardedModel
from titan_rl.titan.weights import adapted_layers_of, has_hf_weights, load_checkpoint, load_hf
from titan_rl.trainers import assembly

if TYPE_CHECKING:
    from titan_rl.trainers.rl import RLTrainer


def load(trainer: Any) -> None:
    """Load the initial weights into the model of an RL or supervised trainer.

    From ``checkpoint.initial_load_path`` (a TorchTitan checkpoint), else from the safetensors in
    ``model.hf_assets_path``, else the random initialisation stays if it is allowed.

    Raises:
        ConfigError: there are no weights and ``model.allow_random_init`` is off, or they do not fit.
    """
    config = trainer.config
    model = ShardedModel.of_trainer(trainer)
    path = config.checkpoint.initial_load_path
    if path:
        load_checkpoint(model, path, with_adapters=False)
        if adapted_layers_of(model):
            # TorchTitan's checkpointer would load it once more, and look for adapters in it.
            trainer.checkpointer.initial_load_path = None
        logger.info("Initial weights: %s", path)
    elif has_hf_weights(config.model.hf_assets_path):
        load_hf(model, assembly.state_dict_adapter(trainer), config.model.hf_assets_path)
        logger.info("Initial weights: %s", config.model.hf_assets_path)
    elif not config.model.allow_random_init:
        raise ConfigError(
            "model.hf_assets_path",
            "hold safetensors weights, or checkpoint.initial_load_path name a checkpoint",
            config.model.hf_assets_path,
            "To start from random weights on purpose, set model.allow_random_init = true.",
        )


def frozen_copy(trainer: RLTrainer, *, offload_to_cpu: bool) -> ShardedModel:
    """A frozen sibling of the policy with the policy's weights of now, under the same parallelism."""
    model = build_sibling(trainer, offload_to_cpu=offload_to_cpu)
    copy_shards(trainer.policy, model)
    return model
