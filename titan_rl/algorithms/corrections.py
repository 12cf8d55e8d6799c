"""Corrections as parts: weights for the mismatch of generator and policy. The maths is in ``functional``."""

from __future__ import annotations

from dataclasses import dataclass

from titan_rl.algorithms.interfaces import CorrectionOutput, LossInputs


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
