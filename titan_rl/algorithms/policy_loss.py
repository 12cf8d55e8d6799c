"""The loss of every policy-gradient algorithm, as a composition of parts, and its metrics.

Which parts exist is in :mod:`titan_rl.algorithms.registries`; log-probabilities are the trainer's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol

import torch

from titan_rl.algorithms.aggregations import TokenMean
from titan_rl.algorithms.corrections import NoCorrection
from titan_rl.algorithms.interfaces import (
    KL,
    Aggregation,
    Correction,
    CorrectionOutput,
    LossInputs,
    LossOutput,
    Needs,
    RatioPart,
    Surrogate,
    SurrogateOutput,
)
from titan_rl.algorithms.penalties import Distillation, EntropyBonus, KLPenalty
from titan_rl.algorithms.ratios import TokenRatio
from titan_rl.algorithms.registries import AGGREGATIONS, CORRECTIONS, KLS, RATIOS, SURROGATES
from titan_rl.algorithms.surrogates import Clipped
from titan_rl.config.choice import Choice, build
from titan_rl.functional.aggregate import token_mean
from titan_rl.functional.kl import k3
from titan_rl.functional.mismatch import mismatch_sums
from titan_rl.functional.ratio import Ratio


class CompileOptions(Protocol):
    """The fields of TorchTitan's ``[compile]`` section that a loss reads."""

    enable: bool
    components: Sequence[str]
    backend: str


class PolicyLoss:
    """Ratio, surrogate, correction, rejection, aggregation, KL and further terms put together.

    ``loss = aggregate(weights * keep * surrogate(ratio, advantages)) + kl.coefficient * aggregate(kl)
    - entropy.coefficient * aggregate(entropy) + distillation.coefficient * aggregate(teacher_kl)``

    A KL penalty that is placed in the reward is not part of the loss.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The parts of the loss. The defaults are GRPO's."""

        ratio: Annotated[object, Choice(RATIOS)] = field(default_factory=TokenRatio.Config)
        """Policy against old policy: what is compared."""
        surrogate: Annotated[object, Choice(SURROGATES)] = field(default_factory=Clipped.Config)
        """Ratio and advantage to a loss per token."""
        correction: Annotated[object, Choice(CORRECTIONS)] = field(default_factory=NoCorrection.Config)
        """Weights for the mismatch between generator and policy."""
        rejection: Annotated[object, Choice(CORRECTIONS)] = field(default_factory=NoCorrection.Config)
        """A second correction, multiplied with the first: what is too far off is not trained on."""
        aggregation: Annotated[object, Choice(AGGREGATIONS)] = field(default_factory=TokenMean.Config)
        """Values per token to one number."""
        kl: Annotated[object, Choice(KLS)] = field(default_factory=KLPenalty.Config)
        """Penalty on the distance to the reference; off at coefficient 0."""
        entropy: EntropyBonus.Config = field(default_factory=EntropyBonus.Config)
        """Bonus on the policy's entropy; off at coefficient 0."""
        distillation: Distillation.Config = field(default_factory=Distillation.Config)
        """Distance to a teacher; off at coefficient 0."""

        def build(self, *, compile_config: CompileOptions | None = None) -> PolicyLoss:
            """Build the loss, the way TorchTitan's trainer asks for it."""
            return PolicyLoss(self, compile_config=compile_config)

    def __init__(self, config: Config, *, compile_config: CompileOptions | None = None) -> None:
        """Build the parts.

        Args:
            config: The parts.
            compile_config: With ``enable`` and ``"loss"`` among its ``components``, the maths from
                log-probabilities to loss and metrics runs through ``torch.compile`` with its ``backend``.
        """
        self.config = config
        self.ratio: RatioPart = build(config.ratio)
        self.surrogate: Surrogate = build(config.surrogate)
        self.corrections: tuple[Correction, ...] = (build(config.correction), build(config.rejection))
        self.aggregation: Aggregation = build(config.aggregation)
        self.kl: KL = build(config.kl)
        self.entropy = EntropyBonus(config.entropy)
        self.distillation = Distillation(config.distillation)
        self._needs_reference = self.kl.coefficient > 0
        self._maths = self._compute
        if compile_config is not None and compile_config.enable and "loss" in compile_config.components:
            self._maths = torch.compile(self._compute, backend=compile_config.backend)

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
    def is_on_policy_only(self) -> bool:
        """Whether the gradient is right for the first optimiser step of an iteration only."""
        return bool(getattr(self.surrogate, "is_on_policy_only", False))

    @property
    def is_zero_without_advantage(self) -> bool:
        """Whether a sample with advantage 0 adds nothing to loss and gradient: without further terms."""
        return not (self.has_kl_in_loss or self.entropy.coefficient or self.distillation.coefficient)

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
        ratio = self.ratio(inputs)
        surrogate = self.surrogate(inputs, ratio)
        corrections = [c for c in (part(inputs) for part in self.corrections) if c is not None]
        per_token = surrogate.loss
        for correction in corrections:
            per_token = per_token * correction.weights
        policy_loss = self.aggregation(inputs, per_token)
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
            metrics.update(_metrics(inputs, ratio, surrogate))
            if corrections:
                metrics.update(_correction_metrics(inputs, corrections))
        return loss, metrics


def _correction_metrics(
    inputs: LossInputs, corrections: Sequence[CorrectionOutput]
) -> dict[str, torch.Tensor]:
    """What the corrections do to the trained tokens of the step."""

    def mean(values: torch.Tensor) -> torch.Tensor:
        return token_mean(values.float(), inputs.loss_mask, inputs.num_loss_tokens)

    weights = torch.stack([c.weights for c in corrections]).prod(0)
    is_truncated = torch.stack([c.is_truncated for c in corrections]).any(0)
    is_rejected = torch.stack([c.is_rejected for c in corrections]).any(0)
    return {
        "correction_weight/mean": mean(weights),
        # Parts of one ratio: the trainer turns them into the effective sample size.
        "correction_weight_square/mean": mean(weights.square()),
        "correction_weight/max": torch.where(inputs.loss_mask, weights, 0.0).amax(),
        "correction_truncated_fraction/mean": mean(is_truncated),
        "correction_rejected_fraction/mean": mean(is_rejected),
    }


def _metrics(inputs: LossInputs, ratio: Ratio, surrogate: SurrogateOutput) -> dict[str, torch.Tensor]:
    """Means over the trained tokens of the step (local sum over global count) and local maxima."""

    def mean(values: torch.Tensor) -> torch.Tensor:
        return token_mean(values.float(), inputs.loss_mask, inputs.num_loss_tokens)

    def largest(values: torch.Tensor) -> torch.Tensor:
        return torch.where(inputs.loss_mask, values, 0.0).amax()

    old = inputs.policy_logprobs if inputs.old_logprobs is None else inputs.old_logprobs
    # Against the policy as it is now: on an iteration's first step the weights are the generator's.
    mismatch = mismatch_sums(inputs.policy_logprobs.detach(), inputs.generator_logprobs, inputs.loss_mask)
    count = torch.as_tensor(inputs.num_loss_tokens).clamp(min=1)
    metrics = {
        "ratio/mean": mean(ratio.ratio),
        "ratio/max": largest(ratio.ratio),
        "log_ratio_clamped_fraction/mean": mean(ratio.is_clamped),
        "clip_low_fraction/mean": mean(surrogate.is_clipped_low),
        "clip_high_fraction/mean": mean(surrogate.is_clipped_high),
        # Tokens come from the old policy, so this estimates KL(old || policy).
        "old_kl/mean": mean(k3(old, inputs.policy_logprobs)),
        "advantage/mean": mean(inputs.advantages),
        "advantage_abs/mean": mean(inputs.advantages.abs()),
        "advantage_abs/max": largest(inputs.advantages.abs()),
        "mismatch_abs/mean": mismatch.abs_sum / count,
        "mismatch_abs/max": mismatch.abs_max,
        "mismatch_k3/mean": mismatch.k3_sum / count,
    }
    if surrogate.is_dual_clipped is not None:
        metrics["clip_dual_fraction/mean"] = mean(surrogate.is_dual_clipped)
    if inputs.ref_logprobs is not None:
        metrics["reference_kl/mean"] = mean(k3(inputs.policy_logprobs, inputs.ref_logprobs))
    if inputs.entropy is not None:
        metrics["entropy/mean"] = mean(inputs.entropy)
    if inputs.teacher_kl is not None:
        metrics["teacher_kl/mean"] = mean(inputs.teacher_kl)
    return metrics
