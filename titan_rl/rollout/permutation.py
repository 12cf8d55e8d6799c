"""The control experiment: rewards that say nothing about the rollouts they stand at."""

from __future__ import annotations

import random
from collections.abc import Sequence

from titan_rl.resilience.seeds import derive_seed
from titan_rl.types import Group


def permute_rewards(groups: Sequence[Group], run_seed: int) -> None:
    """Hand the rewards of all scored rollouts of a rank to one another, in a random order.

    The mean and the deviation over the rank stay, so everything runs as before, and the expected policy
    gradient is 0. Within groups alone it would not be: where the baseline is not the group's own mean,
    rollouts of a prompt that is often solved, most of them right, would still be encouraged. For the same
    reason greedy baselines take part.

    Args:
        groups: Changed in place. The order depends on the seed and on the groups that this rank has.
        run_seed: Of the run.
    """
    rollouts = [rollout for group in groups for rollout in (*group.rollouts, group.baseline)]
    scored = [rollout for rollout in rollouts if rollout is not None and rollout.reward is not None]
    if not scored:
        return
    rewards = [rollout.reward for rollout in scored]
    random.Random(derive_seed(run_seed, "permute_rewards", groups[0].index)).shuffle(rewards)
    for rollout, reward in zip(scored, rewards, strict=True):
        rollout.reward = reward
