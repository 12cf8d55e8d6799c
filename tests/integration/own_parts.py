"""A user's own class in every place of a composition, each with an effect that can be told from the numbers.

Named in TOML as ``tests.integration.own_parts:...``; docs/algorithms/your_own.md says what each receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titan_rl.algorithms.interfaces import (
    CorrectionOutput,
    GroupRewards,
    LossInputs,
    Needs,
    SurrogateOutput,
)
from titan_rl.algorithms.loss import Loss
from titan_rl.functional.ratio import Ratio


@dataclass(kw_only=True, slots=True)
class _Config:
    factor: float = 1.0


class _Part:
    @dataclass(kw_only=True, slots=True)
    class Config(_Config):
        """One number."""

    def __init__(self, config: _Config) -> None:
        self.factor = config.factor


class Advantage(_Part):
    """The reward itself, times the factor."""

    needs = Needs()

    def __call__(self, groups: Sequence[GroupRewards]) -> list[float]:
        return [self.factor * reward for group in groups for reward in group.rewards]


class DoubledRatio(_Part):
    """The factor at the old policy."""

    def __call__(self, inputs: LossInputs) -> Ratio:
        log_ratio = inputs.policy_logprobs - inputs.old_logprobs
        return Ratio(self.factor * log_ratio.exp(), log_ratio, torch.zeros_like(inputs.loss_mask))


class Surrogate(_Part):
    """Everything is said to be clipped below."""

    def __call__(self, inputs: LossInputs, ratio: Ratio) -> SurrogateOutput:
        nowhere = torch.zeros_like(inputs.loss_mask)
        return SurrogateOutput(-self.factor * inputs.advantages * ratio.ratio, ~nowhere, nowhere)


class Correction(_Part):
    """The factor as the weight of every token."""

    def __call__(self, inputs: LossInputs) -> CorrectionOutput:
        nowhere = torch.zeros_like(inputs.loss_mask)
        return CorrectionOutput(torch.full_like(inputs.advantages, self.factor), nowhere, nowhere)


class Rejection(_Part):
    """Tokens whose advantage is below the factor are left out."""

    def __call__(self, inputs: LossInputs) -> CorrectionOutput:
        rejected = inputs.loss_mask & (inputs.advantages < self.factor)
        return CorrectionOutput((~rejected).float(), torch.zeros_like(rejected), rejected)


class Aggregation(_Part):
    """Sum over tokens, over samples, times the factor."""

    def __call__(self, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
        return self.factor * torch.where(inputs.loss_mask, values, 0.0).sum() / inputs.num_samples


class Penalty(_Part):
    """The factor plus the log-ratio to the reference, in the loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(_Config):
        """The strength, and the number."""

        coefficient: float = 0.0

    is_in_reward = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.coefficient = config.coefficient

    def __call__(self, policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        return self.factor + policy_logprobs - ref_logprobs

    def adapted(self, measured: float, num_samples: int) -> float:
        return self.coefficient


class WholeLoss(Loss):
    """A policy gradient whose value is ``-factor A`` at every token."""

    @dataclass(kw_only=True, slots=True)
    class Config(Loss.Config):
        """One number beside the terms."""

        factor: float = 1.0

    def policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        one = (inputs.policy_logprobs - inputs.policy_logprobs.detach()).exp()
        value = self.aggregation(inputs, -self.config.factor * inputs.advantages * one)
        return value, {"own/max": inputs.advantages.max()}
