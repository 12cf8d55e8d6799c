"""What every policy-gradient loss has: terms beside the policy loss, what they need, and common metrics.

The loss that is composed of parts is :mod:`titan_rl.algorithms.policy_loss`; one of a user's own derives from
:class:`Loss` too. Log-probabilities are the trainer's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol

import torch

from titan_rl.algorithms.aggregations import TokenMean
from titan_rl.algorithms.interfaces import KL, Aggregation, LossInputs, LossOutput, Needs
from titan_rl.algorithms.penalties import Distillation, EntropyBonus, KLPenalty
from titan_rl.algorithms.registries import AGGREGATIONS, KLS
from titan_rl.config.choice import Choice, build
from titan_rl.functional.aggregate import token_mean
from titan_rl.functional.kl import k3
from titan_rl.functional.mismatch import mismatch_sums


class CompileOptions(Protocol):
    """The fields of TorchTitan's ``[compile]`` section that a loss reads."""

    enable: bool
    components: Sequence[str]
    backend: str


class Loss(ABC):
    """A policy loss, and KL penalty, entropy bonus and distillation added to it.

    ``loss = policy_loss + kl.coefficient * aggregate(kl) - entropy.coefficient * aggregate(entropy)
    + distillation.coefficient * aggregate(teacher_kl)``

    A KL penalty that is placed in the reward is not part of the loss. A loss of one's own implements
    :meth:`policy_loss`, nests ``class Config(Loss.Config)`` and is named by ``[loss] type``.
    """

    is_on_policy_only = False
    """Whether the gradient is right for the first optimiser step of an iteration only; more are refused."""

    is_zero_at_zero_advantage = False
    """Whether a token of advantage 0 adds nothing to the policy loss, so that it need not be computed."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The terms beside the policy loss, and how tokens become one number."""

        aggregation: Annotated[object, Choice(AGGREGATIONS)] = field(default_factory=TokenMean.Config)
        """Values per token to one number."""
        kl: Annotated[object, Choice(KLS)] = field(default_factory=KLPenalty.Config)
        """Penalty on the distance to the reference; off at coefficient 0."""
        entropy: EntropyBonus.Config = field(default_factory=EntropyBonus.Config)
        """Bonus on the policy's entropy; off at coefficient 0."""
        distillation: Distillation.Config = field(default_factory=Distillation.Config)
        """Distance to a teacher; off at coefficient 0."""

        def build(self, *, compile_config: CompileOptions | None = None) -> Loss:
            """Build the loss, the way TorchTitan's trainer asks for it."""
            return build(self, compile_config=compile_config)

    def __init__(self, config: Config, *, compile_config: CompileOptions | None = None) -> None:
        """Build the terms.

        Args:
            config: The table ``[loss]``.
            compile_config: With ``enable`` and ``"loss"`` among its ``components``, the maths from
                log-probabilities to loss and metrics runs through ``torch.compile`` with its ``backend``.
        """
        self.config = config
        self.aggregation: Aggregation = build(config.aggregation)
        self.kl: KL = build(config.kl)
        self.entropy = EntropyBonus(config.entropy)
        self.distillation = Distillation(config.distillation)
        self._needs_reference = self.kl.coefficient > 0
        self._maths = self._compute
        if compile_config is not None and compile_config.enable and "loss" in compile_config.components:
            self._maths = torch.compile(self._compute, backend=compile_config.backend)

    @abstractmethod
    def policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """This micro-batch's share of what the rewards teach, without the terms.

        Args:
            inputs: ``[B, T]``, 0 outside ``loss_mask``; ``old_logprobs`` is filled in.

        Returns:
            The 0-d share with grad, and metrics without grad: ``name/mean`` for parts of a mean over the
            trained tokens of the step, ``name/max`` for maxima. All micro-batches have the same names.
        """

    def needs(self, *, steps_per_iteration: int) -> Needs:
        """What this loss asks of the rest of the system.

        Args:
            steps_per_iteration: K. From the second step on the weights differ from those of the start of the
                iteration, so their log-probabilities have to be kept.
        """
        return Needs(
            old=steps_per_iteration > 1 or (self._needs_reference and self.kl.is_in_reward),
            reference=self._needs_reference,
            teacher=self.distillation.coefficient > 0,
        )

    @property
    def has_kl_in_loss(self) -> bool:
        """Whether the KL penalty is a term of the loss."""
        return self._needs_reference and not self.kl.is_in_reward

    @property
    def is_zero_without_advantage(self) -> bool:
        """Whether a sample with advantage 0 adds nothing to loss and gradient, the terms included."""
        has_terms = self.has_kl_in_loss or self.entropy.coefficient or self.distillation.coefficient
        return self.is_zero_at_zero_advantage and not has_terms

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Loss and metrics of one micro-batch.

        Args:
            inputs: ``[B, T]`` log-probabilities, advantages and masks, and the global counts of the step.

        Returns:
            This micro-batch's share of the loss and of the metrics (docs/algorithms/grpo.md defines each).

        Raises:
            ValueError: When shapes do not fit, or the penalty is on and there are no ``ref_logprobs``.
        """
        inputs.check_shapes()
        factors = {
            "ref_logprobs": 0.0 if self.kl.is_in_reward else self.kl.coefficient,
            "entropy": self.entropy.coefficient,
            "teacher_kl": self.distillation.coefficient,
        }
        for name, factor in factors.items():
            if factor > 0 and getattr(inputs, name) is None:
                raise ValueError(f"{name} must be given with a coefficient of {factor}; got None.")
        # As tensors, counts and an adaptive coefficient do not make torch.compile specialise on their values.
        device = inputs.policy_logprobs.device
        inputs = replace(
            inputs,
            num_loss_tokens=torch.as_tensor(inputs.num_loss_tokens, device=device),
            num_samples=torch.as_tensor(inputs.num_samples, device=device),
        )
        coefficient = torch.tensor(factors["ref_logprobs"], device=device)
        loss, metrics = self._maths(inputs, coefficient)
        return LossOutput(loss, metrics)

    def _compute(
        self, inputs: LossInputs, kl_coefficient: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """From here on nothing but tensors: this is what is compiled."""
        inputs = inputs.masked()
        policy_loss, own_metrics = self.policy_loss(inputs)
        loss = policy_loss
        if inputs.ref_logprobs is not None and self.has_kl_in_loss:
            kl = self.kl(inputs.policy_logprobs, inputs.ref_logprobs)
            loss = loss + kl_coefficient * self.aggregation(inputs, kl)
        if inputs.entropy is not None and self.entropy.coefficient > 0:
            loss = loss - self.entropy.coefficient * self.aggregation(inputs, inputs.entropy)
        if inputs.teacher_kl is not None and self.distillation.coefficient > 0:
            loss = loss + self.distillation.coefficient * self.aggregation(inputs, inputs.teacher_kl)
        metrics = {"loss/mean": loss.detach(), "policy_loss/mean": policy_loss.detach()}
        with torch.no_grad():
            metrics.update(_metrics(inputs))
        return loss, metrics | own_metrics


def mean_over_step(inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """This micro-batch's part of the mean of ``[B, T]`` values over the trained tokens of the step."""
    return token_mean(values.float(), inputs.loss_mask, inputs.num_loss_tokens)


def largest(inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """The largest of ``[B, T]`` values at a trained token of this micro-batch, at least 0."""
    return torch.where(inputs.loss_mask, values, 0.0).amax()


def _metrics(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """Means over the trained tokens of the step (local sum over global count) and local maxima."""
    old = inputs.policy_logprobs if inputs.old_logprobs is None else inputs.old_logprobs
    # Against the policy as it is now: on an iteration's first step the weights are the generator's.
    mismatch = mismatch_sums(inputs.policy_logprobs.detach(), inputs.generator_logprobs, inputs.loss_mask)
    count = torch.as_tensor(inputs.num_loss_tokens).clamp(min=1)
    metrics = {
        # Tokens come from the old policy, so this estimates KL(old || policy).
        "old_kl/mean": mean_over_step(inputs, k3(old, inputs.policy_logprobs)),
        "advantage/mean": mean_over_step(inputs, inputs.advantages),
        "advantage_abs/mean": mean_over_step(inputs, inputs.advantages.abs()),
        "advantage_abs/max": largest(inputs, inputs.advantages.abs()),
        "mismatch_abs/mean": mismatch.abs_sum / count,
        "mismatch_abs/max": mismatch.abs_max,
        "mismatch_k3/mean": mismatch.k3_sum / count,
    }
    if inputs.ref_logprobs is not None:
        metrics["reference_kl/mean"] = mean_over_step(inputs, k3(inputs.policy_logprobs, inputs.ref_logprobs))
    if inputs.entropy is not None:
        metrics["entropy/mean"] = mean_over_step(inputs, inputs.entropy)
    if inputs.teacher_kl is not None:
        metrics["teacher_kl/mean"] = mean_over_step(inputs, inputs.teacher_kl)
    return metrics
