"""Supervised training on prompts with answers: pretraining and SFT.

The training step and its metrics are TorchTitan's; data, validation, initial weights, export, checkpoints and
stopping are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from titan_rl.resilience.manifest import Facts, HeldOut
from titan_rl.resilience.saving import CheckpointManager
from titan_rl.titan.api import CrossEntropyLoss, Trainer
from titan_rl.titan.models import ModelSection
from titan_rl.trainers import assembly, checks, initial_weights
from titan_rl.trainers.exporting import export
from titan_rl.trainers.held_out import HeldOutValidator, ValidationSection
from titan_rl.trainers.resilient import ResilientTrainer
from titan_rl.trainers.sections import ResilienceSection
from titan_rl.trainers.supervised_data import SupervisedDataLoader, SupervisedDataSection


class SupervisedTrainer(ResilientTrainer):
    """TorchTitan's trainer on our prompts and answers."""

    kind = "supervised"

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """TorchTitan's sections, ``[model]``, ``[data]`` and ``[validation]``."""

        model: ModelSection = field(default_factory=ModelSection)
        """Which model."""
        data: SupervisedDataSection = field(default_factory=SupervisedDataSection)
        """Which documents."""
        validation: ValidationSection = field(default_factory=ValidationSection)
        """Loss and accuracy on held-out documents."""
        resilience: ResilienceSection = field(default_factory=ResilienceSection)
        """When to save, to stop and to give up."""
        # TorchTitan types these fields by their base classes; each is built by its own class alone.
        loss: CrossEntropyLoss.Config = field(  # pyrefly: ignore[bad-override-mutable-attribute]
            default_factory=CrossEntropyLoss.Config
        )
        dataloader: SupervisedDataLoader.Config = field(  # pyrefly: ignore[bad-override-mutable-attribute]
            default_factory=SupervisedDataLoader.Config
        )
        checkpoint: CheckpointManager.Config = field(  # pyrefly: ignore[bad-override-mutable-attribute]
            default_factory=CheckpointManager.Config
        )

        def __post_init__(self) -> None:
            Trainer.Config.__post_init__(self)

    # Narrower, as the classes above are.
    config: Config  # pyrefly: ignore[bad-override-mutable-attribute]
    validator: HeldOutValidator  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: Config) -> None:
        """Hand ``[data]`` to the data loader and the validator, then let TorchTitan build.

        Raises:
            ConfigError: the configuration contradicts itself.
        """
        checks.check_supervised_config(config, world_size=assembly.world_size_from_env())
        self.hf_config = assembly.hf_config(config) if assembly.needs_hf_config(config) else None
        config.dataloader = SupervisedDataLoader.Config(
            section=config.data, seed=config.debug.seed if config.debug.seed is not None else 0
        )
        config.validator = HeldOutValidator.Config(
            enable=config.validation.num_documents > 0,
            section=config.validation,
            data=config.data,
            last_step=config.training.steps,
            folder=config.dump_folder,
        )
        super().__init__(config)
        # TorchTitan saves before it validates: the score of the step is to stand in the manifest.
        self.checkpointer.defers = config.validator.enable

    def facts(self) -> Facts:
        """The loss on held-out documents after this step."""
        loss = self.validator.measured.get(self.step) if self.config.validator.enable else None
        held_out = None if loss is None else HeldOut("validation/loss", loss, is_higher_better=False)
        return Facts(trainer=self.kind, held_out=held_out)

    def should_continue_training(self) -> bool:
        """The safe point, which comes after the validation. Collective."""
        self.checkpointer.save_deferred()
        return super().should_continue_training()

    def train(self) -> None:
        """Load the initial weights, let TorchTitan train, and export.

        A checkpoint of the run takes precedence over the initial weights.
        """
        initial_weights.load(self)
        checkpoints = Path(self.config.dump_folder) / self.config.checkpoint.folder
        is_first_start = not any(checkpoints.glob("step-*"))
        if is_first_start and self.config.validator.enable and self.validator.should_validate(0):
            self.validator.validate(self.model_parts, 0)
        super().train()
        if self.config.model.export and self.outcome == "done":
            export(self)
