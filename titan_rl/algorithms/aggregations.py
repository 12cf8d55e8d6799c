"""Aggregations as parts: values per token to one number. The maths is in ``functional``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titan_rl.algorithms.interfaces import LossInputs
from titan_rl.functional.aggregate import token_mean


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
