"""Importance ratios as parts. The maths is in :mod:`titan_rl.functional.ratio`."""

from __future__ import annotations

from dataclasses import dataclass

from titan_rl.algorithms.interfaces import LossInputs, required
from titan_rl.functional.ratio import Ratio, token_ratio


class TokenRatio:
    """A ratio of its own for each token, ``exp(policy - old)``."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The token ratio has no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> Ratio:
        """``[B, T]`` ratio with grad."""
        return token_ratio(inputs.policy_logprobs, required(inputs.old_logprobs, "old_logprobs"))
