"""The control experiment: rewards that say nothing about the rollouts they stand at."""

from __future__ import annotations

import random
from collections.abc import Sequence

from titan_rl.resilience.seeds import derive_seed
from titan_rl.types import Group


def permute_rewards(groups: Sequence[Group], run_seed: int) -> None:
    """Hand the rewards of each group to its scored rollouts in a random order.

    Means and deviations of the groups stay, so everything runs as before; the expected policy gradient is 0.

    Args:
        groups: Changed in place. A group's order depends on the seed and its index alone.
        run_seed: Of the run.
    """
    for group in groups:
        scored = [rollout for rollout in group.rollouts if rollout.reward is not None]
        rewards = [rollout.reward for rollout in scored]
        random.Random(derive_seed(run_seed, "permute_rewards", group.index)).shuffle(rewards)
        for rollout, reward in zip(scored, rewards, strict=True):
            rollout.reward = reward
