"""A trained reward model among the rewards of an RL run: it scores whole batches, beside the policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_rl.policy.reward_scorer import RewardScorer
from titan_rl.rollout.samples import to_samples
from titan_rl.titan.reward_models import open_reward_model
from titan_rl.trainers.optimization import align_ranks
from titan_rl.trainers.row_shape import row_shape
from titan_rl.trainers.sections import RewardModelSection
from titan_rl.types import Group, Reward

if TYPE_CHECKING:
    from titan_rl.trainers.rl import RLTrainer

PART = "reward_model"
"""Name of the part in metrics and in recorded rollouts."""


class ModelReward:
    """Adds ``weight * score`` to the rewards of rollouts.

    The rewards of ``[[reward]]`` tables come first; a rollout whose reward failed there stays without one.
    """

    def __init__(self, trainer: RLTrainer, section: RewardModelSection) -> None:
        """Open the reward model under the policy's parallelism. Collective.

        Args:
            trainer: Whose policy is built.
            section: ``[reward_model]``.

        Raises:
            ConfigError: it is no reward model, or does not fit the policy.
        """
        self._trainer, self._section = trainer, section
        model = open_reward_model(trainer, section.path, where="reward_model.path")
        self._scorer = RewardScorer(model)

    def __call__(self, groups: Sequence[Group]) -> None:
        """Score this rank's rollouts. Collective.

        Args:
            groups: Scored by the other rewards; changed in place.
        """
        trainer = self._trainer
        scored = [r for group in groups for r in group.rollouts if r.reward is not None]
        scored += [g.baseline for g in groups if g.baseline is not None and g.baseline.reward is not None]
        baselines = [dataclasses.replace(g, rollouts=[g.baseline]) for g in groups if g.baseline is not None]
        samples = to_samples([*groups, *baselines])
        batch = align_ranks(
            trainer.batch_maker.pack(samples, [0.0] * len(samples)),
            num_samples=len(samples),
            collectives=trainer.collectives,
            device=trainer.device,
            empty_shape=row_shape(trainer.config).empty,
        )
        weight, is_alone = self._section.weight, self._section.is_alone
        values = self._scorer(batch.micro_batches, len(samples)).tolist()
        for rollout, value in zip(scored, values, strict=True):
            reward = rollout.reward
            if reward is None or not math.isfinite(value):
                rollout.reward, rollout.reward_error = None, f"{PART}: the score is {value}"
                continue
            total = weight * value + (0.0 if is_alone else reward.total)
            rollout.reward = Reward(total=total, parts={**reward.parts, PART: value})
