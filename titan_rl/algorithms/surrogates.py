"""Surrogates as parts: ratio and advantage to a loss per token. The maths is in ``functional``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from titan_rl.algorithms.interfaces import LossInputs, SurrogateOutput, required
from titan_rl.errors import ConfigError
from titan_rl.functional.divergence_surrogate import total_variation_masked
from titan_rl.functional.ratio import Ratio
from titan_rl.functional.sample_surrogate import geometric_mean_surrogate
from titan_rl.functional.surrogate import (
    clipped_surrogate,
    clipped_weight_surrogate,
    dual_clipped_surrogate,
    reinforce_surrogate,
    soft_gated_surrogate,
)


class Clipped:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), with a bound of its own on each side."""

    is_zero_at_zero_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Bounds of the ratio."""

        clip_low: Annotated[float, Ge(0), Le(1)] = 0.2
        """How far below 1 the ratio may go before a token with a negative advantage stops learning."""
        clip_high: Annotated[float, Ge(0)] = 0.2
        """How far above 1 the ratio may go before a token with a positive advantage stops learning."""
        clip_dual: Annotated[float, Ge(0)] = 0.0
        """Dual clip (Ye et al. 2020): a token with a negative advantage stops learning when its ratio is
        above this, usually 3; 0 is off, otherwise above 1."""

    def __init__(self, config: Config) -> None:
        if not 0 <= config.clip_low <= 1:
            raise ConfigError(
                "loss.surrogate.clip_low", "be between 0 and 1", config.clip_low, "0.2 is the usual value."
            )
        if not config.clip_high >= 0:
            raise ConfigError(
                "loss.surrogate.clip_high", "be 0 or more", config.clip_high, "0.2 is the usual value."
            )
        if config.clip_dual != 0 and not config.clip_dual > 1 + config.clip_high:
            raise ConfigError(
                "loss.surrogate.clip_dual",
                f"be 0, or above 1 + loss.surrogate.clip_high = {1 + config.clip_high:g}",
                config.clip_dual,
                "3 is the usual value.",
            )
        self.config = config

    def __call__(self, inputs: LossInputs, ratio: Ratio) -> SurrogateOutput:
        """``[B, T]`` loss with grad, and where it is clipped."""
        low, high, dual = self.config.clip_low, self.config.clip_high, self.config.clip_dual
        if dual:
            return SurrogateOutput(
                *dual_clipped_surrogate(
                    ratio.ratio, inputs.advantages, clip_low=low, clip_high=high, clip_dual=dual
                )
            )
        return SurrogateOutput(
            *clipped_surrogate(ratio.ratio, inputs.advantages, clip_low=low, clip_high=high)
        )


class Reinforce:
    """``-A log p``: no ratio, no bound (Williams 1992). Right with one optimiser step per iteration only."""

    is_on_policy_only = True
    is_zero_at_zero_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """There are no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs, ratio: Ratio) -> SurrogateOutput:
        """``[B, T]`` loss with grad; nothing is clipped."""
        return SurrogateOutput(*reinforce_surrogate(inputs.policy_logprobs, inputs.advantages))


class ClippedWeight:
    """CISPO's bounded importance weight (MiniMax 2025, eq. 4 and 5): a bounded token still learns."""

    is_zero_at_zero_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Bounds of the weight, relative to 1."""

        clip_low: Annotated[float, Ge(0), Le(1)] = 1.0
        """How far below 1 the weight may go; 1 is no lower bound."""
        clip_high: Annotated[float, Ge(0)] = 0.28
        """How far above 1 the weight may go."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs, ratio: Ratio) -> SurrogateOutput:
        """``[B, T]`` loss with grad, and where the weight is bounded."""
        return SurrogateOutput(
            *clipped_weight_surrogate(
                inputs.policy_logprobs,
                ratio.ratio,
                inputs.advantages,
                clip_low=self.config.clip_low,
                clip_high=self.config.clip_high,
            )
        )


class SoftGated:
    """SAPO's smooth gate in place of a clip (Gao et al. 2025)."""

    is_zero_at_zero_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """How fast the gradient fades away from a ratio of 1."""

        tau_positive: Annotated[float, Gt(0)] = 1.0
        """Temperature of tokens with a positive advantage."""
        tau_negative: Annotated[float, Gt(0)] = 1.05
        """Temperature of the others."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs, ratio: Ratio) -> SurrogateOutput:
        """``[B, T]`` loss with grad; nothing is clipped."""
        return SurrogateOutput(
            *soft_gated_surrogate(
                ratio.ratio,
                inputs.advantages,
                tau_positive=self.config.tau_positive,
                tau_negative=self.config.tau_negative,
            )
        )


class GeometricMean:
    """GMPO's geometric mean of a sample's token ratios, each clipped on its own (Zhao et al. 2025)."""

    is_zero_at_zero_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Bounds of each token's log-ratio."""

        clip_low: Annotated[float, Ge(0)] = 0.4
        """How far below 0 a token's log-ratio may go, in nats."""
        clip_high: Annotated[float, Ge(0)] = 0.4
        """How far above 0 a token's log-ratio may go, in nats."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs, ratio: Ratio) -> SurrogateOutput:
        """``[B, T]`` loss with grad, and which tokens' own ratios are clipped."""
        return SurrogateOutput(
            *geometric_mean_surrogate(
                ratio.log_ratio,
                inputs.advantages,
                loss_mask=inputs.loss_mask,
                sample_index=inputs.sample_index,
                clip_low=self.config.clip_low,
                clip_high=self.config.clip_high,
            )
        )


class TotalVariation:
    """DPPO's trust region on probabilities instead of ratios (Qi et al. 2026, binary total variation)."""

    is_zero_at_zero_advantage = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """How far a token's probability may move."""

        max_decrease: Annotated[float, Ge(0), Le(1)] = 0.2
        """Largest decrease of a probability that is still pushed further."""
        max_increase: Annotated[float, Ge(0), Le(1)] = 0.2
        """Largest increase of a probability that is still pushed further."""
        max_weight: Annotated[float, Gt(0)] = 20.0
        """Largest importance weight of a token; a larger one becomes this. ``inf`` is none, as in the
        paper."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs, ratio: Ratio) -> SurrogateOutput:
        """``[B, T]`` loss with grad, and which tokens are dropped."""
        return SurrogateOutput(
            *total_variation_masked(
                inputs.policy_logprobs,
                required(inputs.old_logprobs, "old_logprobs"),
                inputs.advantages,
                max_decrease=self.config.max_decrease,
                max_increase=self.config.max_increase,
                max_weight=self.config.max_weight,
            )
        )
