"""Parts of one's own: an advantage, a surrogate, a KL penalty, an algorithm made of them, and a whole loss.

They stand for what a paper of next week might need. docs/algorithms/your_own.md explains them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt

from titan_rl.algorithms.aggregations import SampleMeanOfTokenMeans
from titan_rl.algorithms.interfaces import GroupRewards, LossInputs, Needs, SurrogateOutput, required
from titan_rl.algorithms.loss import Loss, mean_over_step
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import AlgorithmPreset
from titan_rl.algorithms.registries import AGGREGATIONS
from titan_rl.config.choice import Choice
from titan_rl.errors import ConfigError
from titan_rl.functional.kl import absolute
from titan_rl.functional.ratio import Ratio
from titan_rl.functional.segments import sample_sum


class MedianBaseline:
    """Reward against the median of the group: ``scale * (r_i - median(r))``."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Table ``[advantage]``."""

        scale: Annotated[float, Gt(0)] = 1.0
        """Factor of every advantage."""

    def __init__(self, config: Config) -> None:
        if not config.scale > 0:
            raise ConfigError("advantage.scale", "be above 0", config.scale, "Leave it out for 1.")
        self.config = config

    @property
    def needs(self) -> Needs:
        """With one sibling the median would be the mean, with none the reward itself."""
        return Needs(smallest_group=3)

    def __call__(self, groups: Sequence[GroupRewards]) -> list[float]:
        """One advantage per rollout, the groups joined."""
        advantages: list[float] = []
        for group in groups:
            median = statistics.median(group.rewards)
            advantages.extend(self.config.scale * (reward - median) for reward in group.rewards)
        return advantages


class WeightedRatio:
    """``-w A ratio``, with ``w`` = ``positive_weight`` where A > 0 and 1 elsewhere; no bound."""

    is_zero_at_zero_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Table ``[loss.surrogate]``."""

        positive_weight: Annotated[float, Ge(0)] = 0.1
        """How much successes count against failures."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs, ratio: Ratio) -> SurrogateOutput:
        """``[B, T]`` loss with grad; nothing is clipped."""
        weight = torch.where(inputs.advantages > 0, self.config.positive_weight, 1.0)
        nowhere = torch.zeros_like(inputs.loss_mask)
        return SurrogateOutput(-weight * inputs.advantages * ratio.ratio, nowhere, nowhere)


class SquaredResidual(Loss):
    """``1/2 (A - tau d)^2`` of a sample, ``d`` its log-ratio to the old policy summed over its tokens.

    Richemond et al. 2024 (DRO, arXiv 2405.19107), eq. 4, with the advantage for "reward minus value" and the
    old policy for the reference. Of no ratio and no surrogate: the square is of a whole sample.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Loss.Config):
        """Table ``[loss]``, beside ``[loss.kl]`` and the other terms."""

        tau: Annotated[float, Gt(0)] = 1.0
        """Strength of the tie to the old policy, in units of reward per nat."""
        aggregation: Annotated[object, Choice(AGGREGATIONS)] = field(
            default_factory=SampleMeanOfTokenMeans.Config
        )
        """The residual is the same at all tokens of a sample; the default gives samples equal weights."""

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        self.tau = config.tau

    def policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The squared residual of each sample, aggregated."""
        log_ratio = inputs.policy_logprobs - required(inputs.old_logprobs, "old_logprobs")
        distance = sample_sum(log_ratio, inputs.loss_mask, inputs.sample_index)
        residual = inputs.advantages - self.tau * distance
        metrics = {"residual_abs/mean": mean_over_step(inputs, residual.detach().abs())}
        return self.aggregation(inputs, residual.square() / 2), metrics


class AbsoluteKL:
    """A penalty in the loss on ``|log p - log p_reference|``: a push of equal size, however far away."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Table ``[loss.kl]``."""

        coefficient: Annotated[float, Ge(0)] = 0.0
        """Factor of the penalty; 0 is off and needs no reference model."""

    def __init__(self, config: Config) -> None:
        self.coefficient = config.coefficient

    @property
    def is_in_reward(self) -> bool:
        """It is added to the loss."""
        return False

    def __call__(self, policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        """``[B, T]`` penalty in nats, with grad."""
        return absolute(policy_logprobs, ref_logprobs)

    def adapted(self, measured: float, num_samples: int) -> float:
        """No controller: the coefficient stays."""
        return self.coefficient


def preset() -> AlgorithmPreset:
    """An algorithm of one's own: ``[algorithm] type = "my_parts:preset"``."""
    return AlgorithmPreset(
        advantage=MedianBaseline.Config(),
        loss=PolicyLoss.Config(surrogate=WeightedRatio.Config(), kl=AbsoluteKL.Config()),
    )
