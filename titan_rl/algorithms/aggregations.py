"""Aggregations as parts: values per token to one number. The maths is in ``functional``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titan_rl.algorithms.interfaces import LossInputs
from titan_rl.functional.aggregate import (
    sample_mean_of_token_means,
    sample_mean_of_token_sums,
    sample_mean_over_constant,
    token_mean,
)


class TokenMean:
    """Mean over all trained tokens of the optimiser step: long completions count in full (DAPO's mean)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The token mean has no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
        """0-d: local sum over the global number of trained tokens."""
        return token_mean(values, inputs.loss_mask, inputs.num_loss_tokens)


class SampleMeanOfTokenMeans:
    """Mean over samples of each sample's mean over its tokens: all samples count alike (GRPO's paper)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """There are no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
        """0-d: local sum of the samples' means over the global number of samples."""
        return sample_mean_of_token_means(
            values, inputs.loss_mask, sample_index=inputs.sample_index, num_samples=inputs.num_samples
        )


class SampleMeanOfTokenSums:
    """Mean over samples of each sample's sum over its tokens: the log-probability of the whole sequence."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """There are no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
        """0-d: local sum over the global number of samples."""
        return sample_mean_of_token_sums(values, inputs.loss_mask, inputs.num_samples)


class SampleMeanOverConstant:
    """Sum over tokens over samples times ``sampling.max_tokens`` (Dr. GRPO, Liu et al. 2025)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """There are no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
        """0-d: local sum over the global number of samples and the longest completion."""
        return sample_mean_over_constant(
            values, inputs.loss_mask, num_samples=inputs.num_samples, max_tokens=inputs.max_tokens
        )
