"""The parts that GRPO is composed of. Each reads its Config once and calls one pure function.

The formulas are in :mod:`titan_rl.functional`, the signatures in :mod:`titan_rl.algorithms.interfaces`, the
names in :mod:`titan_rl.algorithms.registries`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le

from titan_rl.algorithms.interfaces import LossInputs, Needs, SurrogateOutput
from titan_rl.errors import ConfigError
from titan_rl.functional import kl
from titan_rl.functional.advantages import group_normalized
from titan_rl.functional.aggregate import token_mean
from titan_rl.functional.ratio import Ratio, token_ratio
from titan_rl.functional.surrogate import clipped_surrogate

_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k2": kl.k2, "k3": kl.k3}


class GroupNormalized:
    """Reward against the mean of its siblings, in their standard deviations (GRPO, Shao et al. 2024)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Options of the group-normalised advantage."""

        normalise_std: bool = True
        """Divide by the standard deviation of the group's rewards (Bessel-corrected)."""
        eps: Annotated[float, Gt(0)] = 1e-6
        """Added to the standard deviation, in units of reward."""

    def __init__(self, config: Config) -> None:
        if not config.eps > 0:
            raise ConfigError("advantage.eps", "be above 0", config.eps, "Leave it out for 1e-6.")
        self.config = config

    @property
    def needs(self) -> Needs:
        """At least two siblings: one alone is its own mean."""
        return Needs(smallest_group=2)

    def __call__(self, groups: Sequence[Sequence[float]]) -> list[float]:
        """Advantage of each rollout.

        Args:
            groups: Rewards of each group's rollouts; those without a reward are absent. The sizes may differ.
                A group is whole on one rank.

        Returns:
            Advantages in the order of the rewards, the groups joined. A rollout without siblings gets 0, its
            reward against its own mean; ``needs.smallest_group`` tells the source to drop such groups.

        >>> GroupNormalized(GroupNormalized.Config(normalise_std=False))([[1.0, 0.0], [0.5, 0.5, 2.0]])
        [0.5, -0.5, -0.5, -0.5, 1.0]
        """
        advantages: list[float] = []
        for rewards in groups:
            if len(rewards) < 2:
                advantages.extend(0.0 for _ in rewards)
                continue
            values = group_normalized(
                torch.tensor(rewards, dtype=torch.float64),
                normalise_std=self.config.normalise_std,
                eps=self.config.eps,
            )
            advantages.extend(values.tolist())
        return advantages


class TokenRatio:
    """A ratio of its own for each token, ``exp(policy - old)``."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The token ratio has no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> Ratio:
        """``[B, T]`` ratio with grad."""
        return token_ratio(inputs.policy_logprobs, _required(inputs.old_logprobs, "old_logprobs"))


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


class NoCorrection:
    """Trust the generator's log-probabilities to be the policy's: no weights, nothing rejected."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """No correction has no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> torch.Tensor | None:
        """None: all weights are one."""
        return None


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


class KLPenalty:
    """A penalty per token on KL(policy || reference), added to the loss and not to the reward.

    k1 is not on offer: as a loss its expected gradient is 0 (:mod:`titan_rl.functional.kl`).
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Strength and estimator of the penalty."""

        coefficient: Annotated[float, Ge(0)] = 0.0
        """Factor of the penalty in the loss (beta); 0 is off and needs no reference model."""
        estimator: Literal["k2", "k3"] = "k3"
        """k3: GRPO's; gradient of KL(reference || policy). k2: that of KL(policy || reference)."""

    def __init__(self, config: Config) -> None:
        if not config.coefficient >= 0:
            raise ConfigError(
                "loss.kl.coefficient", "be 0 or more", config.coefficient, "Set 0 to train without a penalty."
            )
        if config.estimator not in _ESTIMATORS:
            raise ConfigError(
                "loss.kl.estimator",
                f"be one of {sorted(_ESTIMATORS)}",
                config.estimator,
                "The gradient of k1 has expectation 0, so it cannot be a penalty; k3 is the default.",
            )
        self.config = config
        self.coefficient = config.coefficient

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """``[B, T]`` estimate with grad, without the coefficient."""
        estimate = _ESTIMATORS[self.config.estimator]
        return estimate(inputs.policy_logprobs, _required(inputs.ref_logprobs, "ref_logprobs"))


def _required(values: torch.Tensor | None, name: str) -> torch.Tensor:
    if values is None:
        raise ValueError(f"{name} must be given to this loss; got None.")
    return values
