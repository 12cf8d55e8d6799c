"""Supervised training on prompts with answers: pretraining and SFT.

The training step and its metrics are TorchTitan's; data, validation, initial weights, export, checkpoints and
stopping are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titan_rl import heartbeat
from titan_rl.errors import RollBackError
from titan_rl.resilience.manifest import Facts, HeldOut
from titan_rl.resilience.saving import CheckpointManager
from titan_rl.titan.api import CrossEntropyLoss, Trainer
from titan_rl.titan.clipping import seen_norms
from titan_rl.titan.models import ModelSection
from titan_rl.trainers import assembly, checks, initial_weights
from titan_rl.trainers.exporting import export
from titan_rl.trainers.held_out import HeldOutValidator, LeftOver, ValidationSection
from titan_rl.trainers.resilient import ResilientTrainer
from titan_rl.trainers.sections import ResilienceSection
from titan_rl.trainers.supervised_data import SupervisedDataLoader, SupervisedDataSection


class _BadGradientError(Exception):
    """Ends TorchTitan's training step before the optimiser's."""


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
        checks.check_supervised_config(
            config, world_size=assembly.world_size_from_env(), device_type=assembly.device_type()
        )
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
        self.left_over = LeftOver()
        # Inputs, labels and loss of the step's micro-batches.
        self._seen: list[tuple[Any, Any, torch.Tensor]] = []
        if config.validator.enable:
            self.validator.left_over, self.validator.unless_stopping = self.left_over, self.unless_stopping
        if config.checkpoint.enable:
            self.checkpointer.states["left_over"] = self.left_over

    def facts(self) -> Facts:
        """The loss on held-out documents after this step."""
        loss = self.validator.measured.get(self.step) if self.config.validator.enable else None
        held_out = None if loss is None else HeldOut("validation/loss", loss, is_higher_better=False)
        return Facts(trainer=self.kind, held_out=held_out)

    def should_continue_training(self) -> bool:
        """The safe point, which comes after the validation. Collective."""
        if self.left_over.is_validation_left and self.config.validator.enable:
            self.validator.validate(self.model_parts, self.step)
        self.checkpointer.save_deferred()
        return super().should_continue_training()

    def has_work_left(self) -> bool:
        """Whether a validation was given up."""
        return self.left_over.is_validation_left and self.config.validator.enable

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """TorchTitan's step."""
        self._seen = []
        try:
            with heartbeat.phase("train"), seen_norms(self._judge):
                super().train_step(data_iterator)
        except _BadGradientError as error:
            self._refuse(str(error))

    def forward_backward_step(self, **given: Any) -> Any:
        """TorchTitan's forward and backward pass of one micro-batch."""
        heartbeat.beat()
        loss = super().forward_backward_step(**given)
        self._seen.append((given["input_dict"], given["labels"], loss.detach()))
        return loss

    def _judge(self, grad_norm: float) -> None:
        cause = self.bad_steps.guard.fault(grad_norm)
        if cause is not None:
            raise _BadGradientError(cause)
        self.bad_steps.applied(grad_norm)

    def _refuse(self, cause: str) -> None:
        """Leave the step out, or go back and on with the documents after those that have been drawn."""
        losses = [float(loss) for _, _, loss in self._seen]
        try:
            self.bad_steps.refuse(cause, losses=losses, tensors=self._micro_batch)
        except RollBackError:
            position = self.dataloader.state_dict()
            self.bad_steps.go_back()
            self.dataloader.load_state_dict(position)

    def _micro_batch(self, number: int) -> dict[str, torch.Tensor]:
        inputs, labels, _ = self._seen[number]
        if isinstance(inputs, dict):
            return {**inputs, "labels": labels}
        # Of a pipeline, the micro-batches of one schedule.
        parts = enumerate(zip(inputs, labels, strict=True))
        return {
            f"{name}.{index}": value
            for index, (part, label) in parts
            for name, value in {**part, "labels": label}.items()
        }

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
