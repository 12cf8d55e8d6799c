"""The critic of PPO: a value model with an optimiser and a schedule of its own.

It scores micro-batches, trains on returns, and is part of the run's checkpoint. Returns and the value loss
are computed elsewhere (:mod:`titan_rl.functional`); when the critic trains is the trainer's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt

from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.functional.expert_load import expert_load
from titan_rl.functional.value import (
    RunningMoments,
    denormalised,
    normalised,
    output_preserving_scale,
    updated_moments,
)
from titan_rl.functional.whitening import whitening_sums
from titan_rl.policy.reward_scorer import token_values
from titan_rl.policy.value_loss import ClippedValueLoss, ValueInputs, ValueLoss, value_statistics
from titan_rl.resilience.seeds import derive_seed
from titan_rl.titan.api import LRSchedulersContainer, logger
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.sections import OptimizerSection, optimizer_from_section
from titan_rl.titan.sharded_model import Hidden, ShardedModel
from titan_rl.titan.value_model import init_head, load_value_checkpoint, rescale_head, value_sibling


@dataclass(frozen=True, slots=True)
class CriticResult:
    """What one step of the critic did.

    Attributes:
        is_applied: False when the gradient was not finite: weights and schedule are unchanged.
        grad_norm: Global gradient norm before clipping.
        metrics: Means over the trained tokens of all ranks, by name (``critic/...``): those of the loss;
            ``value`` and ``return`` in units of reward; ``explained_variance``, 1 minus the variance of the
            errors over that of the returns; the gradient norm and the learning rate.
    """

    is_applied: bool
    grad_norm: float
    metrics: dict[str, float]


def _constant_schedule() -> LRSchedulersContainer.Config:
    return LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)


class Critic:
    """A value model with its optimiser, schedule, counters and statistics of the returns.

    Attributes:
        model: The sharded value model.
        optimizers: TorchTitan's.
        lr_schedulers: TorchTitan's; they advance with the applied steps.
        applied_steps: Steps that changed the weights.
        skipped_steps: Steps whose gradient was not finite.
        moments: Of all returns observed, with ``normalise_values``; otherwise of none.
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

        warmup_iterations: Annotated[int, Ge(0)] | Literal["all"] = 0
        """Iterations at the start in which the critic trains and the policy does not. ``"all"``: the policy
        is never trained, to measure a critic or to train one ahead."""

        normalise_values: bool = False
        """Predict returns in their running standard deviations from their running mean. When these change,
        the head is rescaled so that no value does (Pop-Art, van Hasselt et al. 2016, arXiv 1602.07714), but
        for a head that has never been trained, whose values become the mean of the first returns."""

    def __init__(
        self,
        config: Config,
        *,
        model: ShardedModel,
        collectives: Collectives,
        total_steps: int,
        loss: ValueLoss | None = None,
        is_pretrained: bool = False,
    ) -> None:
        """Make the optimiser and the schedule of a value model.

        Args:
            config: ``[critic]``.
            model: A value model with its initial weights and a bias in its head.
            collectives: Of the run.
            total_steps: The critic's optimiser steps in the whole run, for the schedule.
            loss: By default :class:`ClippedValueLoss`.
            is_pretrained: Whether the head gives values in units of reward already.
        """
        self.config, self.model, self._collectives = config, model, collectives
        self._loss = ClippedValueLoss(config.clip_range) if loss is None else loss
        self._is_pretrained = is_pretrained
        self.moments = self._old_moments = RunningMoments.empty()
        optimizer = optimizer_from_section(config.optimizer)
        self.optimizers = optimizer.build(model_parts=model.parts)
        self.lr_schedulers = config.lr_scheduler.build(optimizers=self.optimizers, training_steps=total_steps)
        self.applied_steps = self.skipped_steps = 0

    def is_warming_up(self, iteration: int) -> bool:
        """Whether the policy must not train yet.

        Args:
            iteration: Iterations committed before this one.
        """
        warmup = self.config.warmup_iterations
        return warmup == "all" or iteration < warmup

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Values ``[B, T]`` fp32 of all real tokens, in units of reward; 0 in the padding. Collective.

        The value at ``t`` has seen the tokens up to ``t``: it is that of the state in which the token at
        ``t + 1`` is sampled, and at a sample's last token that of the state after it.

        Args:
            micro_batches: On the model's device.
        """
        rows = self.model.scores(micro_batches, lambda _, hidden: token_values(self.model, hidden))
        if self.config.normalise_values:
            rows = [denormalised(values, self.moments) for values in rows]
        return [
            torch.where(micro_batch.sample_index >= 0, values, 0.0)
            for micro_batch, values in zip(micro_batches, rows, strict=True)
        ]

    def observe(self, returns: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> None:
        """Take an iteration's returns into the statistics, before the first step on them. Collective.

        Without ``normalise_values`` nothing happens. Returns that are not finite are left out, with the rest
        of their iteration: they would stay in the statistics for ever.

        Args:
            returns: This rank's, in units of reward, one ``[B, T]`` per micro-batch of the iteration.
            masks: The same, bool, True where a token is trained.
        """
        if not self.config.normalise_values:
            return
        sums = [whitening_sums(values, mask) for values, mask in zip(returns, masks, strict=True)]
        names = ("count", "total", "total_of_squares")
        local_sums = {name: math.fsum(part[i] for part in sums) for i, name in enumerate(names)}
        totals = self._collectives.reduce(local_sums, "sum")
        if not all(map(math.isfinite, totals.values())):
            logger.warning("Returns that are not finite are left out of the critic's statistics.")
            return
        before, self.moments = self.moments, updated_moments(self.moments, **totals)
        if before.count == 0 and not self._is_pretrained:
            # Nothing is worth preserving: the untrained head starts at the mean of the returns instead.
            self._old_moments = before
            return
        factor, shift = output_preserving_scale(before, self.moments)
        rescale_head(self.model, factor=float(factor), shift=float(shift))
        self._old_moments = self.moments

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        returns: Sequence[torch.Tensor],
        old_values: Sequence[torch.Tensor],
        num_loss_tokens: int,
    ) -> CriticResult:
        """Train on one batch: forward-backward over its micro-batches, clip, step. Collective.

        A gradient that is not finite changes nothing, on all ranks alike.

        Args:
            micro_batches: This rank's, as many as every other rank has.
            returns: One ``[B, T]`` per micro-batch, in units of reward.
            old_values: The same; what the critic gave at the start of the iteration.
            num_loss_tokens: Trained tokens of the step, over all ranks and micro-batches.
        """
        parts = self.accumulate(
            micro_batches, returns=returns, old_values=old_values, num_loss_tokens=num_loss_tokens
        )
        grad_norm = self.model.clip_grad_norm(self.config.max_norm)  # of all ranks: all decide alike
        is_applied = math.isfinite(grad_norm)
        load = expert_load(self.model.take_router_load())
        rate = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        if is_applied:
            self.optimizers.step()
            self.lr_schedulers.step()
            self.applied_steps += 1
        else:
            self.skipped_steps += 1
            logger.warning("A step of the critic is skipped: its gradient norm is %s.", grad_norm)
        self.optimizers.zero_grad(set_to_none=True)
        metrics = self._reduce(parts) | {f"critic/moe_{name}": value for name, value in load.items()}
        metrics |= {"critic/grad_norm": grad_norm, "critic/lr": float(rate)}
        return CriticResult(is_applied=is_applied, grad_norm=grad_norm, metrics=metrics)

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        returns: Sequence[torch.Tensor],
        old_values: Sequence[torch.Tensor],
        num_loss_tokens: int,
    ) -> list[dict[str, torch.Tensor]]:
        """Compute the gradient of :meth:`train_step`, which explains the arguments. Collective.

        FSDP sums gradients over ranks and autograd over micro-batches.

        Returns:
            Parts of metrics, one dict per micro-batch, in the loss's units.
        """
        self.optimizers.zero_grad(set_to_none=True)

        def loss(index: int, hidden: Hidden) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            micro_batch, target, old = micro_batches[index], returns[index], old_values[index]
            if self.config.normalise_values:
                target, old = normalised(target, self.moments), normalised(old, self._old_moments)
            values = token_values(self.model, hidden)
            inputs = ValueInputs(
                values=torch.where(micro_batch.sample_index >= 0, values, 0.0),
                returns=target,
                old_values=old,
                loss_mask=micro_batch.loss_mask,
                num_loss_tokens=num_loss_tokens,
            )
            value, metrics = self._loss(inputs)
            return value, metrics | value_statistics(inputs)

        return self.model.forward_backward(micro_batches, loss)

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments, schedule and counters."""
        counters = {"applied_steps": self.applied_steps, "skipped_steps": self.skipped_steps}
        moments = {name: value.clone() for name, value in self.moments._asdict().items()}
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizers.state_dict(),
            "lr_scheduler": self.lr_schedulers.state_dict(),
            "moments": moments,
            **{name: torch.tensor(value, dtype=torch.int64) for name, value in counters.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.model.load_state_dict(state_dict["model"])
        self.optimizers.load_state_dict(state_dict["optimizer"])
        self.lr_schedulers.load_state_dict(state_dict["lr_scheduler"])
        self.moments = self._old_moments = RunningMoments(**state_dict["moments"])
        self.applied_steps = int(state_dict["applied_steps"])
        self.skipped_steps = int(state_dict["skipped_steps"])

    def _reduce(self, parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Means over the tokens of all micro-batches and ranks, values and returns in units of reward."""
        names = sorted({name for part in parts for name in part})
        local_sums = {name: math.fsum(float(part[name]) for part in parts) for name in names}
        means = self._collectives.reduce(local_sums, "sum")
        square, error_square = means.pop("return_square"), means.pop("error_square")
        variance = square - means["return"] ** 2
        error_variance = error_square - (means["return"] - means["value"]) ** 2
        means["explained_variance"] = 1.0 - error_variance / variance if variance > 0 else math.nan
        if self.config.normalise_values:
            pair = torch.tensor([means["value"], means["return"]], dtype=torch.float64)
            means["value"], means["return"] = denormalised(pair, self.moments).tolist()
        return {f"critic/{name}": value for name, value in means.items()}


def build_critic(
    config: Critic.Config,
    trainer: Any,
    *,
    policy: ShardedModel,
    collectives: Collectives,
    seed: int,
    total_steps: int,
    loss: ValueLoss | None = None,
) -> Critic:
    """Build a critic like the policy, with its initial weights. Collective.

    Args:
        config: ``[critic]``.
        trainer: A TorchTitan trainer.
        policy: Its model, with its initial weights.
        collectives: Of the run.
        seed: The run seed, for a head that is drawn.
        total_steps: The critic's optimiser steps in the whole run.
        loss: By default :class:`ClippedValueLoss`.

    Raises:
        ConfigError: ``critic.initial_load_path`` is not a checkpoint of this architecture.
    """
    model = value_sibling(trainer, policy, head_bias=True)
    init_head(model, std=config.head_init_std, seed=derive_seed(seed, "critic", "head"))
    path, has_head = config.initial_load_path, False
    if path:
        has_head = load_value_checkpoint(model, path, where="critic.initial_load_path")
        logger.info(
            "Initial weights of the critic: %s, %s a scalar head", path, "with" if has_head else "without"
        )
    critic = Critic(
        config,
        model=model,
        collectives=collectives,
        total_steps=total_steps,
        loss=loss,
        is_pretrained=has_head,
    )
    after_build = trainer.config.model_spec.post_optimizer_build_fn
    if after_build is not None:  # routers of mixtures of experts are balanced in a hook of the optimiser
        after_build(critic.optimizers, model.parts, trainer.parallel_dims)
    return critic
