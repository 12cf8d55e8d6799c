"""The critic of PPO: a value model with an optimiser and a schedule of its own.

It scores micro-batches, trains on returns, and is part of the run's checkpoint. Returns and the value loss
are computed elsewhere (:mod:`titan_rl.functional`); when the critic trains is the trainer's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import nn

from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.policy.token_scores import PrepareInputs, fsdp_modules
from titan_rl.resilience.seeds import derive_seed
from titan_rl.titan.api import LRSchedulersContainer, clip_grad_norm_, logger
from titan_rl.titan.sections import OptimizerSection, optimizer_from_section
from titan_rl.titan.value_model import init_head, load_value_checkpoint, token_values, value_sibling


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueInputs:
    """What a value loss sees of one micro-batch. Tensors are ``[B, T]``, aligned with the prediction.

    Attributes:
        values: fp32 with grad; the value at ``t`` is that of the state in which the token at ``t + 1`` is
            sampled. 0 in the padding.
        returns: fp32, what the values are trained towards.
        old_values: fp32, the critic's at the start of the iteration.
        loss_mask: bool, True where a token is trained; everywhere else the loss must give no gradient.
        num_loss_tokens: Trained tokens of the step, over all ranks and micro-batches: the divisor of a mean.
    """

    values: torch.Tensor
    returns: torch.Tensor
    old_values: torch.Tensor
    loss_mask: torch.Tensor
    num_loss_tokens: int


ValueLoss = Callable[[ValueInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Gives this micro-batch's part of the loss (0-d, with grad), and its parts of metrics by ``name/mean`` or
``name/max``, as a policy loss does."""


@dataclass(frozen=True, slots=True)
class CriticResult:
    """What one step of the critic did.

    Attributes:
        is_applied: False when the gradient was not finite: weights and schedule are unchanged.
        grad_norm: Global gradient norm before clipping.
        metrics: The loss's parts of metrics, one dict per micro-batch of this rank.
    """

    is_applied: bool
    grad_norm: float
    metrics: list[dict[str, torch.Tensor]]


def _constant_schedule() -> LRSchedulersContainer.Config:
    return LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)


class Critic:
    """A value model with its optimiser, schedule and counters.

    Attributes:
        model: The sharded value model.
        optimizers: TorchTitan's.
        lr_schedulers: TorchTitan's; they advance with the applied steps.
        applied_steps: Steps that changed the weights.
        skipped_steps: Steps whose gradient was not finite.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Table ``[critic]``."""

        initial_load_path: str = ""
        """TorchTitan checkpoint (a ``step-N`` directory) of a model of the policy's architecture. One with a
        scalar head, such as a reward model's, is taken whole; of a language model's the head is left out.
        Empty: the policy's initial weights."""

        head_init_std: Annotated[float, Ge(0)] = 0.0
        """Standard deviation of a head that is not loaded. 0: every value starts at 0."""

        optimizer: OptimizerSection = field(default_factory=lambda: OptimizerSection(lr=1e-5))
        """The critic's own optimiser, table ``[critic.optimizer]``."""

        lr_scheduler: LRSchedulersContainer.Config = field(default_factory=_constant_schedule)
        """The critic's own schedule, table ``[critic.lr_scheduler]``, over its own optimiser steps."""

        max_norm: Annotated[float, Gt(0)] = 1.0
        """Largest norm of the critic's gradient; a larger one is scaled down."""

        clip_range: Annotated[float, Ge(0)] = 0.2
        """How far a value may move from that of the start of the iteration before it stops learning, in units
        of reward (of standard deviations of the returns with ``normalise_values``). 0: no bound."""

        warmup_iterations: Annotated[int, Ge(0)] = 0
        """Iterations at the start in which the critic trains and the policy does not."""

        normalise_values: bool = False
        """Predict returns in their running standard deviations from their running mean."""

    def __init__(
        self,
        config: Config,
        *,
        model: nn.Module,
        prepare: PrepareInputs,
        context: Callable[[], AbstractContextManager[None]],
        total_steps: int,
    ) -> None:
        """Make the optimiser and the schedule of a value model.

        Args:
            config: ``[critic]``.
            model: A value model with its initial weights.
            prepare: Builds the model's arguments, the policy's own function.
            context: TorchTitan's context for forward and backward.
            total_steps: The critic's optimiser steps in the whole run, for the schedule.
        """
        self.config, self.model = config, model
        self._prepare, self._context = prepare, context
        optimizer = optimizer_from_section(config.optimizer)
        self.optimizers = optimizer.build(model_parts=[model])
        self.lr_schedulers = config.lr_scheduler.build(optimizers=self.optimizers, training_steps=total_steps)
        self.applied_steps = self.skipped_steps = 0

    def is_warming_up(self, iteration: int) -> bool:
        """Whether the policy must not train yet.

        Args:
            iteration: Iterations committed before this one.
        """
        return iteration < self.config.warmup_iterations

    @torch.no_grad()
    def __call__(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Values ``[B, T]`` fp32 of all real tokens, in units of reward; 0 in the padding. Collective.

        The value at ``t`` has seen the tokens up to ``t``: it is that of the state in which the token at
        ``t + 1`` is sampled, and at a sample's last token that of the state after it.

        Args:
            micro_batch: On the model's device.
        """
        with self._context():
            values = self._values(micro_batch)
        for module in fsdp_modules(self.model):
            # Without a backward pass FSDP keeps the last gathered weights, which the next step makes stale.
            module.reshard()
        return values

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        returns: Sequence[torch.Tensor],
        old_values: Sequence[torch.Tensor],
        num_loss_tokens: int,
        loss: ValueLoss,
    ) -> CriticResult:
        """Train on one batch: forward-backward over its micro-batches, clip, step. Collective.

        A gradient that is not finite changes nothing, on all ranks alike.

        Args:
            micro_batches: This rank's, as many as every other rank has.
            returns: One ``[B, T]`` per micro-batch.
            old_values: The same; what the critic gave at the start of the iteration.
            num_loss_tokens: Trained tokens of the step, over all ranks and micro-batches.
            loss: Divides by ``num_loss_tokens``, so that the sum over ranks and micro-batches is a mean.
        """
        metrics = self.accumulate(
            micro_batches, returns=returns, old_values=old_values, num_loss_tokens=num_loss_tokens, loss=loss
        )
        norm = clip_grad_norm_(self.model.parameters(), self.config.max_norm, foreach=True)
        grad_norm = float(norm)  # of all ranks' gradients, so that all decide alike
        is_applied = math.isfinite(grad_norm)
        if is_applied:
            self.optimizers.step()
            self.lr_schedulers.step()
            self.applied_steps += 1
        else:
            self.skipped_steps += 1
            logger.warning("A step of the critic is skipped: its gradient norm is %s.", grad_norm)
        self.optimizers.zero_grad(set_to_none=True)
        return CriticResult(is_applied=is_applied, grad_norm=grad_norm, metrics=metrics)

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        returns: Sequence[torch.Tensor],
        old_values: Sequence[torch.Tensor],
        num_loss_tokens: int,
        loss: ValueLoss,
    ) -> list[dict[str, torch.Tensor]]:
        """Compute the gradient of :meth:`train_step`, which explains the arguments. Collective.

        FSDP sums gradients over ranks and autograd over micro-batches.

        Returns:
            The loss's parts of metrics, one dict per micro-batch.
        """
        self.optimizers.zero_grad(set_to_none=True)
        metrics = []
        for micro_batch, target, old in zip(micro_batches, returns, old_values, strict=True):
            with self._context():
                inputs = ValueInputs(
                    values=self._values(micro_batch),
                    returns=target,
                    old_values=old,
                    loss_mask=micro_batch.loss_mask,
                    num_loss_tokens=num_loss_tokens,
                )
                value, parts = loss(inputs)
                value.backward()
            metrics.append(parts)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments, schedule and counters."""
        counters = {"applied_steps": self.applied_steps, "skipped_steps": self.skipped_steps}
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizers.state_dict(),
            "lr_scheduler": self.lr_schedulers.state_dict(),
            **{name: torch.tensor(value, dtype=torch.int64) for name, value in counters.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.model.load_state_dict(state_dict["model"])
        self.optimizers.load_state_dict(state_dict["optimizer"])
        self.lr_schedulers.load_state_dict(state_dict["lr_scheduler"])
        self.applied_steps = int(state_dict["applied_steps"])
        self.skipped_steps = int(state_dict["skipped_steps"])

    def _values(self, micro_batch: MicroBatch) -> torch.Tensor:
        inputs, kwargs = self._prepare(micro_batch)
        values = token_values(self.model, inputs, **kwargs)
        return torch.where(micro_batch.sample_index >= 0, values, 0.0)


def build_critic(
    config: Critic.Config, trainer: Any, *, prepare: PrepareInputs, seed: int, total_steps: int
) -> Critic:
    """Build a critic like the policy, with its initial weights. Collective.

    Args:
        config: ``[critic]``.
        trainer: A TorchTitan trainer whose policy has its initial weights.
        prepare: Builds a model's arguments from a micro-batch.
        seed: The run seed, for a head that is drawn.
        total_steps: The critic's optimiser steps in the whole run.

    Raises:
        ConfigError: ``critic.initial_load_path`` is not a checkpoint of this architecture.
    """
    model = value_sibling(trainer)
    init_head(model, std=config.head_init_std, seed=derive_seed(seed, "critic", "head"))
    path = config.initial_load_path
    if path:
        has_head = load_value_checkpoint(model, path, where="critic.initial_load_path")
        logger.info(
            "Initial weights of the critic: %s, %s a scalar head", path, "with" if has_head else "without"
        )
    critic = Critic(
        config, model=model, prepare=prepare, context=trainer.train_context, total_steps=total_steps
    )
    after_build = trainer.config.model_spec.post_optimizer_build_fn
    if after_build is not None:  # routers of mixtures of experts are balanced in a hook of the optimiser
        after_build(critic.optimizers, [model], trainer.parallel_dims)
    return critic
