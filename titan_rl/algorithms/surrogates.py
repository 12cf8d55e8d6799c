"""Surrogates as parts: ratio and advantage to a loss per token. The maths is in ``functional``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from titan_rl.algorithms.interfaces import LossInputs, SurrogateOutput
from titan_rl.errors import ConfigError
from titan_rl.functional.ratio import Ratio
from titan_rl.functional.surrogate import clipped_surrogate


class Clipped:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), with a bound of its own on each side."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Bounds of the ratio."""

        clip_low: Annotated[float, Ge(0), Le(1)] = 0.2
        """How far below 1 the ratio may go before a token with a negative advantage stops learning."""
        clip_high: Annotated[float, Ge(0)] = 0.2
        """How far above 1 the ratio may go before a token with a positive advantage stops learning."""

    def __init__(self, config: Config) -> None:
        if not 0 <= config.clip_low <= 1:
            raise ConfigError(
                "loss.surrogate.clip_low", "be between 0 and 1", config.clip_low, "0.2 is the usual value."
            )
        if not config.clip_high >= 0:
            raise ConfigError(
                "loss.surrogate.clip_high", "be 0 or more", config.clip_high, "0.2 is the usual value."
            )
        self.config = config

    def __call__(self, inputs: LossInputs, ratio: Ratio) -> SurrogateOutput:
        """``[B, T]`` loss with grad, and where it is clipped."""
        return SurrogateOutput(
            *clipped_surrogate(
                ratio.ratio,
                inputs.advantages,
                clip_low=self.config.clip_low,
                clip_high=self.config.clip_high,
            )
        )
