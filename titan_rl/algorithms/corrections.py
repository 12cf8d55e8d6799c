"""Corrections as parts: weights for the mismatch of generator and policy. The maths is in ``functional``.

The ratio is that of the old policy to the generator; the old policy is the policy itself in an iteration of
one optimiser step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt

from titan_rl.algorithms.interfaces import CorrectionOutput, LossInputs, required
from titan_rl.errors import ConfigError
from titan_rl.functional.correction import (
    masked_token_weights,
    mismatch_log_ratio,
    reject_negative_samples_by_mean_k1,
    reject_samples_by_geometric_mean,
    reject_samples_by_mean_k3,
    reject_tokens,
    truncated_sample_weights,
    truncated_token_weights,
)


class NoCorrection:
    """Trust the generator's log-probabilities to be the policy's: no weights, nothing rejected."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """No correction has no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> CorrectionOutput | None:
        """None: all weights are one."""
        return None


class TruncatedTokens:
    """Truncated importance sampling per token (TIS, Yao et al. 2025)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The largest weight."""

        cap: Annotated[float, Gt(0)] = 2.0
        """A weight above this becomes this."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> CorrectionOutput:
        """``min(ratio, cap)`` of each token."""
        return CorrectionOutput(
            *truncated_token_weights(_log_ratio(inputs), inputs.loss_mask, cap=self.config.cap)
        )


class TruncatedSamples:
    """Truncated importance sampling per sample: the product of its token ratios, at most the cap."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The largest weight."""

        cap: Annotated[float, Gt(0)] = 2.0
        """A weight above this becomes this."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> CorrectionOutput:
        """One weight per sample, at each of its tokens."""
        return CorrectionOutput(
            *truncated_sample_weights(
                _log_ratio(inputs), inputs.loss_mask, sample_index=inputs.sample_index, cap=self.config.cap
            )
        )


@dataclass(kw_only=True, slots=True)
class _Bounds:
    """Ratios that are kept."""

    low: Annotated[float, Ge(0)] = 0.5
    """Smallest ratio that is kept."""
    high: Annotated[float, Gt(0)] = 2.0
    """Largest ratio that is kept."""

    def __post_init__(self) -> None:
        # Named within the table: a part stands in [loss.correction] or in [loss.rejection].
        if not self.low < self.high:
            raise ConfigError("low", f"be below high = {self.high}", self.low, "Lower it, or raise high.")


class MaskedTokens:
    """The importance ratio itself within bounds, and no weight outside (IcePop, Ling Team 2025)."""

    @dataclass(kw_only=True, slots=True)
    class Config(_Bounds):
        """Ratios that are kept."""

        high: Annotated[float, Gt(0)] = 5.0
        """Largest ratio that is kept."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> CorrectionOutput:
        """The ratio of each token, 0 where it is rejected."""
        low, high = self.config.low, self.config.high
        return CorrectionOutput(
            *masked_token_weights(_log_ratio(inputs), inputs.loss_mask, low=low, high=high)
        )


class RejectTokens:
    """Leave out each token whose ratio is outside bounds; the others keep a weight of 1."""

    @dataclass(kw_only=True, slots=True)
    class Config(_Bounds):
        """Ratios that are kept."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> CorrectionOutput:
        """1, or 0 where a token is rejected."""
        low, high = self.config.low, self.config.high
        return _keep_others(reject_tokens(_log_ratio(inputs), inputs.loss_mask, low=low, high=high), inputs)


class RejectSamplesByGeometricMean:
    """Leave out each sample whose geometric mean of ratios is outside bounds (Liu et al. 2025)."""

    @dataclass(kw_only=True, slots=True)
    class Config(_Bounds):
        """Geometric means that are kept; length does not matter, so they are close to 1."""

        low: Annotated[float, Ge(0)] = 0.99
        """Smallest geometric mean that is kept."""
        high: Annotated[float, Gt(0)] = 1.01
        """Largest geometric mean that is kept."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> CorrectionOutput:
        """1, or 0 at all tokens of a rejected sample."""
        is_rejected = reject_samples_by_geometric_mean(
            _log_ratio(inputs),
            inputs.loss_mask,
            sample_index=inputs.sample_index,
            low=self.config.low,
            high=self.config.high,
        )
        return _keep_others(is_rejected, inputs)


class RejectSamplesByMeanK3:
    """Leave out each sample whose mean k3 estimate of KL(generator || policy) is too large."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The largest mean."""

        max_kl: Annotated[float, Ge(0)] = 0.01
        """Largest mean that is kept, in nats per token."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> CorrectionOutput:
        """1, or 0 at all tokens of a rejected sample."""
        is_rejected = reject_samples_by_mean_k3(
            _log_ratio(inputs),
            inputs.loss_mask,
            sample_index=inputs.sample_index,
            max_kl=self.config.max_kl,
        )
        return _keep_others(is_rejected, inputs)


class RejectNegativeSamples:
    """Leave out samples of negative advantage that the policy has moved away from (DeepSeek-V3.2, eq. 9)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The largest drift."""

        max_kl: Annotated[float, Ge(0)] = 0.05
        """Largest mean of generator minus policy log-probability that is kept, in nats per token."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> CorrectionOutput:
        """1, or 0 at all tokens of a rejected sample."""
        log_ratio = mismatch_log_ratio(inputs.policy_logprobs, inputs.generator_logprobs, inputs.loss_mask)
        is_rejected = reject_negative_samples_by_mean_k1(
            log_ratio,
            inputs.loss_mask,
            sample_index=inputs.sample_index,
            advantages=inputs.advantages,
            max_kl=self.config.max_kl,
        )
        return _keep_others(is_rejected, inputs)


def _log_ratio(inputs: LossInputs) -> torch.Tensor:
    old = required(inputs.old_logprobs, "old_logprobs")
    return mismatch_log_ratio(old, inputs.generator_logprobs, inputs.loss_mask)


def _keep_others(is_rejected: torch.Tensor, inputs: LossInputs) -> CorrectionOutput:
    weights = (inputs.loss_mask & ~is_rejected).to(inputs.policy_logprobs.dtype)
    return CorrectionOutput(weights, torch.zeros_like(is_rejected), is_rejected)
