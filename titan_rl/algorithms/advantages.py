"""Advantages as parts: rewards of groups in, one advantage per rollout out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt

from titan_rl.algorithms.interfaces import GroupRewards, Needs
from titan_rl.errors import ConfigError
from titan_rl.functional.advantages import group_normalized


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
