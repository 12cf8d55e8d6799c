"""Training a reward model on pairs: a scalar head on a decoder, read at the last token of a completion."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch

from titan_rl import heartbeat
from titan_rl.algorithms.preference_registry import REWARD_MODEL_LOSSES
from titan_rl.algorithms.reward_model_losses import DEFAULT
from titan_rl.config.choice import Choice
from titan_rl.errors import ConfigError
from titan_rl.policy.reward_scorer import document_rewards
from titan_rl.resilience.seeds import derive_seed
from titan_rl.titan.api import Trainer, logger
from titan_rl.titan.reward_models import initial_head_std, renamed_head, with_reward_head
from titan_rl.titan.sharded_model import Hidden
from titan_rl.titan.value_model import init_head, load_value_checkpoint, value_spec
from titan_rl.titan.weights import WeightStream, export_hf, has_hf_weights, load_hf
from titan_rl.trainers import assembly
from titan_rl.trainers.pair_batches import PairBatch
from titan_rl.trainers.pair_trainer import PairTrainer


class RewardModelTrainer(PairTrainer):
    """Reward modelling as a TorchTitan trainer, from the weights of a language model."""

    kind = "reward_model"

    @dataclass(kw_only=True, slots=True)
    class Config(PairTrainer.Config):
        """The sections of a reward-model run."""

        loss: Annotated[object, Choice(REWARD_MODEL_LOSSES)] = field(  # pyrefly: ignore[bad-override]
            default_factory=DEFAULT
        )
        """What is minimised: table ``[loss]`` with ``type``."""

        def __post_init__(self) -> None:
            Trainer.Config.__post_init__(self)

    config: Config  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: Config) -> None:
        """Give the model a scalar head and build as :class:`PairTrainer` does.

        Raises:
            ConfigError: the configuration contradicts itself or the files it names.
        """
        spec: Any = config.model_spec
        config.model_spec = value_spec(spec)
        super().__init__(config)
        if self.hf_config is not None:
            self.hf_config = with_reward_head(self.hf_config)

    @classmethod
    def pairs_for(cls, config: Any) -> str:
        """The trainer and its loss."""
        name = Choice(REWARD_MODEL_LOSSES).name_of(config.loss)
        return f'trainer = "reward_model" with loss.type = "{name}"'

    def load_initial_weights(self) -> None:
        """Load a language model's or a reward model's weights; a head that is not loaded is drawn.

        Raises:
            ConfigError: there are none and ``model.allow_random_init`` is off, or they do not fit.
        """
        config, dim = self.config, int(self.model_config.dim)  # pyrefly: ignore[missing-attribute]
        init_head(self.policy, std=initial_head_std(dim), seed=derive_seed(self.run_seed, "reward head"))
        path, assets = config.checkpoint.initial_load_path, config.model.hf_assets_path
        if path:
            has_head = load_value_checkpoint(self.policy, path)
            # TorchTitan's checkpointer would load it once more, head and all.
            self.checkpointer.initial_load_path = None
        elif has_hf_weights(assets):
            path, has_head = assets, load_hf(self.policy, self._adapter(), assets, has_scalar_head=True)
        elif config.model.allow_random_init:
            return
        else:
            raise ConfigError(
                "model.hf_assets_path",
                "hold safetensors weights, or checkpoint.initial_load_path name a checkpoint",
                assets,
                "To start from random weights on purpose, set model.allow_random_init = true.",
            )
        logger.info(
            "Initial weights: %s, %s", path, "with its scalar head" if has_head else "a new scalar head"
        )

    def values(self, batch: PairBatch, hidden: Hidden) -> torch.Tensor:
        """Reward of each completion, ``[N]``."""
        return document_rewards(self.policy, hidden, batch.micro_batch, len(batch.keys))

    def export(self) -> Path:
        """Write the reward model as a sequence classifier with one label. Collective."""
        directory = Path(self.config.dump_folder) / "export"
        with heartbeat.phase("checkpoint"):
            export_hf(
                renamed_head(WeightStream(self.policy, self._adapter())),
                directory=directory,
                hf_config=self.hf_config or {},
                assets=self.config.hf_assets_path,
                is_tied=False,
            )
        return directory

    def _adapter(self) -> Any:
        trainer: Any = self
        return assembly.state_dict_adapter(trainer)
