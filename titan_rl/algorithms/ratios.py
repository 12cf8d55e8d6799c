"""Importance ratios as parts. The maths is in :mod:`titan_rl.functional.ratio`."""

from __future__ import annotations

from dataclasses import dataclass

from titan_rl.algorithms.interfaces import LossInputs, required
from titan_rl.functional.ratio import Ratio, sequence_ratio, sequence_token_ratio, token_ratio


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


class SequenceRatio:
    """One ratio per sample: the geometric mean of its token ratios (GSPO, Zheng et al. 2025)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """How the ratio of a sequence is formed."""

        length_normalise: bool = True
        """Divide the sequence's log-ratio by its number of tokens; otherwise it is the product of ratios."""
        token_gradient: bool = True
        """GSPO-token: the sequence's value with each token's own gradient, so advantages may differ within a
        sample. With one advantage per sample and a mean over its tokens both forms are the same."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> Ratio:
        """``[B, T]`` ratio with grad, equal in value within a sample."""
        ratio = sequence_token_ratio if self.config.token_gradient else sequence_ratio
        return ratio(
            inputs.policy_logprobs,
            required(inputs.old_logprobs, "old_logprobs"),
            loss_mask=inputs.loss_mask,
            sample_index=inputs.sample_index,
            length_normalise=self.config.length_normalise,
        )
