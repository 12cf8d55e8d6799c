"""Every table of an RL run's TOML file: TorchTitan's sections, and ours beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from titan_rl.algorithms.loss import Loss
from titan_rl.algorithms.preset import AlgorithmPreset
from titan_rl.algorithms.refill import RefillSection
from titan_rl.algorithms.registries import ADVANTAGES, ALGORITHMS, DEFAULT_ALGORITHM
from titan_rl.algorithms.shaping import ShapingSection
from titan_rl.config.choice import Choice, owner_of
from titan_rl.config.registry import resolve
from titan_rl.errors import ConfigError
from titan_rl.generation.registry import GENERATORS
from titan_rl.generation.vllm import VllmGenerator
from titan_rl.policy.critic import Critic
from titan_rl.policy.teacher import Teacher
from titan_rl.resilience.saving import CheckpointManager
from titan_rl.rewards.pool import RewardPool
from titan_rl.rollout.evaluation import EvaluationSection
from titan_rl.titan.api import Trainer
from titan_rl.titan.lora import LoraSection
from titan_rl.titan.models import ModelSection
from titan_rl.trainers.data_loaders import NoDataLoader
from titan_rl.trainers.sections import (
    AlgorithmSection,
    DataSection,
    ReferenceSection,
    RewardModelSection,
    RLBatchingSection,
    RLResilienceSection,
    SamplingSection,
)
from titan_rl.weight_sync.push import WeightSyncSection


def _default() -> AlgorithmPreset:
    return resolve(DEFAULT_ALGORITHM, ALGORITHMS, "algorithm.type")()


@dataclass(kw_only=True, slots=True)
class RLConfig(Trainer.Config):
    """TorchTitan's sections, and ours."""

    # Suppressed: it follows [model], which is settled before tyro reads TorchTitan's command line.
    hf_assets_path: Annotated[str, tyro.conf.Suppress] = ""
    model: ModelSection = field(default_factory=ModelSection)
    """Which model."""
    # Suppressed: adapters are part of the model.
    lora: Annotated[LoraSection | None, tyro.conf.Suppress] = None
    """Adapters that are trained in place of the weights."""
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    """Which composition, and how many optimiser steps per iteration."""
    advantage: Annotated[object, Choice(ADVANTAGES)] = field(default_factory=lambda: _default().advantage)
    """Rewards of a group to advantages."""
    shaping: ShapingSection = field(default_factory=ShapingSection)
    """What is done to rewards before the advantage, and to advantages after it."""
    # TorchTitan types these fields by their base classes; each is built by its own class alone. That [loss]
    # has a type is a rule of the overlay's: tyro needs the dataclass for TorchTitan's command line.
    loss: Loss.Config = field(  # pyrefly: ignore[bad-override]
        default_factory=lambda: _default().loss
    )
    """Composed of parts (ratio, surrogate, correction, aggregation and KL), or a class of your own."""
    data: DataSection = field(default_factory=DataSection)
    """Prompts."""
    reward: list[dict[str, Any]] = field(default_factory=list)
    """``[[reward]]`` tables: ``type``, ``weight``, ``name`` and the reward's own keys."""
    reward_model: RewardModelSection | None = None
    """A trained reward model among the rewards."""
    reward_workers: RewardPool.Config = field(default_factory=RewardPool.Config)
    """Worker processes that compute rewards, per rank."""
    sampling: SamplingSection = field(default_factory=SamplingSection)
    """How completions are drawn."""
    refill: RefillSection = field(default_factory=RefillSection)
    """Whether groups that teach nothing are replaced."""
    generator: Annotated[object, Choice(GENERATORS)] = field(default_factory=VllmGenerator.Config)
    """The engine that samples."""
    weight_sync: WeightSyncSection = field(default_factory=WeightSyncSection)
    """Bounds of the handshake."""
    batching: RLBatchingSection = field(default_factory=RLBatchingSection)
    """How samples become rows."""
    reference: ReferenceSection = field(default_factory=ReferenceSection)
    """The frozen model of the KL term."""
    critic: Critic.Config | None = None
    """The value model of an advantage that needs one; its defaults count without the table."""
    teacher: Teacher.Config | None = None
    """The model that a loss with ``distillation`` draws the policy to."""
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    """Scores on held-out prompts."""
    resilience: RLResilienceSection = field(default_factory=RLResilienceSection)
    """When to save, to stop and to give up."""
    dataloader: NoDataLoader.Config = field(  # pyrefly: ignore[bad-override-mutable-attribute]
        default_factory=NoDataLoader.Config
    )
    checkpoint: CheckpointManager.Config = field(  # pyrefly: ignore[bad-override-mutable-attribute]
        default_factory=lambda: CheckpointManager.Config(last_save_model_only=False)
    )

    def __post_init__(self) -> None:
        Trainer.Config.__post_init__(self)
        if not isinstance(self.loss, Loss.Config) or not issubclass(owner_of(type(self.loss)), Loss):
            raise ConfigError(
                "loss.type",
                "name a class derived from Loss of titan_rl.algorithms.loss, with a Config(Loss.Config)",
                owner_of(type(self.loss)).__qualname__,
                "docs/algorithms/your_own.md has an example.",
            )
