"""Aggregations of a user's own: a right one, and four that compute something else when the layout changes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from titan_rl.algorithms.interfaces import LossInputs


class Right:
    """The mean over all trained tokens of the step."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """No options."""

    def __init__(self, config):
        self.config = config

    def __call__(self, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
        return torch.where(inputs.loss_mask, values, 0.0).sum() / inputs.num_loss_tokens


class MeanOfTheMicroBatch(Right):
    """Every micro-batch divides by its own count."""

    def __call__(self, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
        return torch.where(inputs.loss_mask, values, 0.0).sum() / inputs.loss_mask.sum().clamp(min=1)


class CountOfTheRank(Right):
    """Every rank divides by its own share of the tokens."""

    def __call__(self, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
        return super().__call__(inputs, values) * dist.get_world_size()


class TermWithoutMask(Right):
    """A term on the probability of every token of the row."""

    def __call__(self, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
        term = inputs.policy_logprobs.exp().sum() / inputs.num_loss_tokens
        return super().__call__(inputs, values) + 0.01 * term


class MeanOfTheRow(Right):
    """Every row is divided by its length, padding and neighbours included."""

    def __call__(self, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
        return torch.where(inputs.loss_mask, values, 0.0).mean(1).sum() / inputs.num_samples
