"""Advantages as parts: rewards of groups in, one advantage per rollout out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le

from titan_rl.algorithms.interfaces import GroupRewards, Needs, TokenCredit, TokenRewards, required
from titan_rl.errors import ConfigError
from titan_rl.functional.advantages import (
    against_baseline,
    group_normalized,
    leave_one_out,
    length_weighted,
)
from titan_rl.functional.returns import discounted_returns, gae, length_adaptive_lambda


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

    def __call__(self, groups: Sequence[GroupRewards]) -> list[float]:
        """Advantage of each rollout.

        Args:
            groups: Rewards of each group's rollouts; those without a reward are absent. The sizes may differ.
                A group is whole on one rank.

        Returns:
            Advantages in the order of the rewards, the groups joined. A rollout without siblings gets 0, its
            reward against its own mean; ``needs.smallest_group`` tells the source to drop such groups.

        >>> groups = [GroupRewards([1.0, 0.0]), GroupRewards([0.5, 0.5, 2.0])]
        >>> GroupNormalized(GroupNormalized.Config(normalise_std=False))(groups)
        [0.5, -0.5, -0.5, -0.5, 1.0]
        """
        return per_group(groups, self._of_group)

    def _of_group(self, rewards: torch.Tensor) -> torch.Tensor:
        return group_normalized(rewards, normalise_std=self.config.normalise_std, eps=self.config.eps)


class LeaveOneOut:
    """Reward against the mean of the other rollouts of the group (RLOO, Ahmadian et al. 2024)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """There are no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def needs(self) -> Needs:
        """At least two siblings."""
        return Needs(smallest_group=2)

    def __call__(self, groups: Sequence[GroupRewards]) -> list[float]:
        """Advantages in the order of the rewards, the groups joined."""
        return per_group(groups, leave_one_out)


class LengthWeighted:
    """Reward against the group's mean weighted by length (OPO, Hao et al. 2025)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """There are no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def needs(self) -> Needs:
        """At least two siblings."""
        return Needs(smallest_group=2)

    def __call__(self, groups: Sequence[GroupRewards]) -> list[float]:
        """Advantages in the order of the rewards, the groups joined."""
        advantages: list[float] = []
        for group in groups:
            lengths = torch.tensor(group.num_tokens, dtype=torch.float64)
            advantages.extend(per_group([group], partial(length_weighted, num_tokens=lengths)))
        return advantages


class GreedyBaseline:
    """Reward against that of the greedy rollout of the same prompt (ReMax, Li et al. 2023)."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """There are no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def needs(self) -> Needs:
        """A greedy rollout for every prompt; siblings are not needed."""
        return Needs(greedy_baseline=True)

    def __call__(self, groups: Sequence[GroupRewards]) -> list[float]:
        """Advantages in the order of the rewards, the groups joined."""
        advantages: list[float] = []
        for group in groups:
            if group.baseline is None:
                raise ValueError("baseline must be given to this advantage; got None.")
            rewards = torch.tensor(group.rewards, dtype=torch.float64)
            advantages.extend(against_baseline(rewards, group.baseline).tolist())
        return advantages


class NoAdvantage:
    """0 for every rollout: nothing is learned from rewards, only from the other terms of the loss."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """There are no options."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def needs(self) -> Needs:
        """Nothing."""
        return Needs()

    def __call__(self, groups: Sequence[GroupRewards]) -> list[float]:
        """Zeros."""
        return [0.0 for group in groups for _ in group.rewards]


class Returns:
    """Discounted returns to go per token (REINFORCE++, Hu et al. 2025); whiten them with ``[shaping]``."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """How rewards are summed."""

        gamma: Annotated[float, Ge(0), Le(1)] = 1.0
        """Discount per token."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def needs(self) -> Needs:
        """Nothing: there is no baseline but the mean that whitening subtracts."""
        return Needs()

    def __call__(self, groups: Sequence[GroupRewards]) -> list[float]:
        """The rewards themselves: earned with the last token."""
        return [float(reward) for group in groups for reward in group.rewards]

    def over_tokens(self, tokens: TokenRewards) -> TokenCredit:
        """``[B, T]`` returns to go as advantages."""
        returns = discounted_returns(
            tokens.rewards, tokens.loss_mask, sample_index=tokens.sample_index, gamma=self.config.gamma
        )
        return TokenCredit(returns, None)


class GAE:
    """Generalised advantage estimation with a critic (Schulman et al. 2015), decoupled or length-adaptive."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Discount and lambdas."""

        gamma: Annotated[float, Ge(0), Le(1)] = 1.0
        """Discount per token."""
        lambda_policy: Annotated[float, Ge(0), Le(1)] = 1.0
        """Lambda of the advantages."""
        lambda_critic: Annotated[float, Ge(0), Le(1)] = 1.0
        """Lambda of the returns that the critic is trained towards; one of its own is VC-PPO's decoupled GAE
        (Yuan et al. 2025)."""
        length_adaptive_alpha: Annotated[float, Ge(0)] = 0.0
        """Above 0, the advantages' lambda is 1 - 1 / (alpha l) for a sample of l tokens instead of
        ``lambda_policy`` (VAPO, Yue et al. 2025; 0.05 there)."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def needs(self) -> Needs:
        """A critic."""
        return Needs(critic=True)

    def __call__(self, groups: Sequence[GroupRewards]) -> list[float]:
        """The rewards themselves: earned with the last token."""
        return [float(reward) for group in groups for reward in group.rewards]

    def over_tokens(self, tokens: TokenRewards) -> TokenCredit:
        """``[B, T]`` advantages, and returns for the critic."""
        config = self.config
        decay: float | torch.Tensor = config.lambda_policy
        if config.length_adaptive_alpha > 0:
            decay = length_adaptive_lambda(
                tokens.loss_mask, tokens.sample_index, alpha=config.length_adaptive_alpha
            )
        return TokenCredit(
            *gae(
                tokens.rewards,
                required(tokens.values, "values"),
                loss_mask=tokens.loss_mask,
                sample_index=tokens.sample_index,
                gamma=config.gamma,
                lambda_policy=decay,
                lambda_critic=config.lambda_critic,
            )
        )


def per_group(
    groups: Sequence[GroupRewards], estimate: Callable[[torch.Tensor], torch.Tensor]
) -> list[float]:
    """Apply an estimate to the rewards of each group, in float64; a rollout without siblings gets 0.

    Args:
        groups: Of any size.
        estimate: From ``[G]`` rewards, G >= 2, to ``[G]`` advantages.
    """
    advantages: list[float] = []
    for group in groups:
        if len(group.rewards) < 2:
            advantages.extend(0.0 for _ in group.rewards)
        else:
            advantages.extend(estimate(torch.tensor(group.rewards, dtype=torch.float64)).tolist())
    return advantages
