"""From samples to one advantage per sample. The formula is the advantage part's; this finds the siblings."""

from __future__ import annotations

from collections.abc import Sequence

from titan_rl.algorithms.interfaces import Advantage
from titan_rl.types import Sample


def sample_advantages(samples: Sequence[Sample], advantage: Advantage) -> list[float]:
    """Advantage of each sample: that of its rollout among the rollouts of its group.

    A rollout that was cut into several samples counts once in its group's statistics, and all its samples get
    its advantage.

    Args:
        samples: One rank's samples; a group is whole on one rank. Rollouts without a reward are absent.
        advantage: The advantage part.

    Returns:
        One advantage per sample, in the order of ``samples``.

    >>> from titan_rl.algorithms.components import GroupNormalized
    >>> def sample(reward, group_index, sample_index):
    ...     return Sample([0, 1], [False, True], [0.0, -1.0], reward, group_index, sample_index, False)
    >>> samples = [sample(1.0, 5, 0), sample(3.0, 8, 0), sample(0.0, 5, 1)]
    >>> samples += [sample(1.0, 8, 1), sample(1.0, 8, 1)]
    >>> sample_advantages(samples, GroupNormalized(GroupNormalized.Config(normalise_std=False)))
    [0.5, 1.0, -0.5, -1.0, -1.0]
    """
    rewards: dict[int, dict[int, float]] = {}
    for sample in samples:
        rewards.setdefault(sample.group_index, {})[sample.sample_index] = sample.reward
    values = advantage([list(group.values()) for group in rewards.values()])
    rollouts = [(group, rollout) for group, members in rewards.items() for rollout in members]
    by_rollout = dict(zip(rollouts, values, strict=True))
    return [by_rollout[sample.group_index, sample.sample_index] for sample in samples]
