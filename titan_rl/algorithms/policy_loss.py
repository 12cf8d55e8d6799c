"""The loss of every named algorithm, as a composition of parts, and the metrics of the parts.

Which parts exist is in :mod:`titan_rl.algorithms.registries`; the terms that are added are in
:mod:`titan_rl.algorithms.loss`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch

from titan_rl.algorithms.corrections import NoCorrection
from titan_rl.algorithms.interfaces import (
    Correction,
    CorrectionOutput,
    LossInputs,
    RatioPart,
    Surrogate,
    SurrogateOutput,
)
from titan_rl.algorithms.loss import CompileOptions, Loss, largest, mean_over_step
from titan_rl.algorithms.ratios import TokenRatio
from titan_rl.algorithms.registries import CORRECTIONS, RATIOS, SURROGATES
from titan_rl.algorithms.surrogates import Clipped
from titan_rl.config.choice import Choice, build
from titan_rl.functional.ratio import Ratio


class PolicyLoss(Loss):
    """Ratio, surrogate, correction, rejection, aggregation, KL and further terms put together.

    ``policy_loss = aggregate(weights * keep * surrogate(ratio, advantages))``; KL, entropy and distillation
    are added to it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Loss.Config):
        """The parts of the loss. The defaults are GRPO's."""

        ratio: Annotated[object, Choice(RATIOS)] = field(default_factory=TokenRatio.Config)
        """Policy against old policy: what is compared."""
        surrogate: Annotated[object, Choice(SURROGATES)] = field(default_factory=Clipped.Config)
        """Ratio and advantage to a loss per token."""
        correction: Annotated[object, Choice(CORRECTIONS)] = field(default_factory=NoCorrection.Config)
        """Weights for the mismatch between generator and policy."""
        rejection: Annotated[object, Choice(CORRECTIONS)] = field(default_factory=NoCorrection.Config)
        """A second correction, multiplied with the first: what is too far off is not trained on."""

    # Narrower than the base class declares it.
    config: Config  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: Config, *, compile_config: CompileOptions | None = None) -> None:
        """Build the parts.

        Args:
            config: The parts.
            compile_config: As for :class:`~titan_rl.algorithms.loss.Loss`.
        """
        super().__init__(config, compile_config=compile_config)
        self.ratio: RatioPart = build(config.ratio)
        self.surrogate: Surrogate = build(config.surrogate)
        self.corrections: tuple[Correction, ...] = (build(config.correction), build(config.rejection))
        self.is_on_policy_only = bool(getattr(self.surrogate, "is_on_policy_only", False))
        # One of a user's own that does not say so may well push tokens of advantage 0.
        self.is_zero_at_zero_advantage = bool(getattr(self.surrogate, "is_zero_at_zero_advantage", False))

    def policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The surrogate's loss per token, weighted and aggregated, and what was clipped and rejected."""
        ratio = self.ratio(inputs)
        surrogate = self.surrogate(inputs, ratio)
        corrections = [c for c in (part(inputs) for part in self.corrections) if c is not None]
        per_token = surrogate.loss
        for correction in corrections:
            per_token = per_token * correction.weights
        with torch.no_grad():
            metrics = _part_metrics(inputs, ratio, surrogate)
            if corrections:
                metrics.update(_correction_metrics(inputs, corrections))
        return self.aggregation(inputs, per_token), metrics


def _correction_metrics(
    inputs: LossInputs, corrections: Sequence[CorrectionOutput]
) -> dict[str, torch.Tensor]:
    """What the corrections do to the trained tokens of the step."""
    weights = torch.stack([c.weights for c in corrections]).prod(0)
    is_truncated = torch.stack([c.is_truncated for c in corrections]).any(0)
    is_rejected = torch.stack([c.is_rejected for c in corrections]).any(0)
    return {
        "correction_weight/mean": mean_over_step(inputs, weights),
        # Parts of one ratio: the trainer turns them into the effective sample size.
        "correction_weight_square/mean": mean_over_step(inputs, weights.square()),
        "correction_weight/max": largest(inputs, weights),
        "correction_truncated_fraction/mean": mean_over_step(inputs, is_truncated),
        "correction_rejected_fraction/mean": mean_over_step(inputs, is_rejected),
    }


def _part_metrics(inputs: LossInputs, ratio: Ratio, surrogate: SurrogateOutput) -> dict[str, torch.Tensor]:
    """Of ratio and surrogate, over the trained tokens of the step."""
    metrics = {
        "ratio/mean": mean_over_step(inputs, ratio.ratio),
        "ratio/max": largest(inputs, ratio.ratio),
        "log_ratio_clamped_fraction/mean": mean_over_step(inputs, ratio.is_clamped),
        "clip_low_fraction/mean": mean_over_step(inputs, surrogate.is_clipped_low),
        "clip_high_fraction/mean": mean_over_step(inputs, surrogate.is_clipped_high),
    }
    if surrogate.is_dual_clipped is not None:
        metrics["clip_dual_fraction/mean"] = mean_over_step(inputs, surrogate.is_dual_clipped)
    return metrics
