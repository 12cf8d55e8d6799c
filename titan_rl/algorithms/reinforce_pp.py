"""REINFORCE++: PPO's clip without a critic, advantages whitened over the whole batch.

Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage
Normalization", arXiv 2501.03262, equations as numbered in version 9. The plain form takes returns to go, with
a KL per token in the reward (eq. 4), and normalises them over all tokens of the batch (eq. 5); the baseline
form subtracts the group's mean reward first (eq. 6 and 7) and puts the KL into the loss (k2, eq. 8). The loss
is the mean over all tokens, where eq. 1 has that over a completion first. KL coefficients are 0 here: set
``loss.kl.coefficient``.
"""

from __future__ import annotations

from titan_rl.algorithms.advantages import GroupNormalized, Returns
from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import AlgorithmPreset
from titan_rl.algorithms.shaping import ShapingSection


def preset() -> AlgorithmPreset:
    """Return the composition of REINFORCE++, freshly made."""
    return AlgorithmPreset(
        advantage=Returns.Config(gamma=1.0),
        loss=PolicyLoss.Config(kl=KLPenalty.Config(placement="reward", estimator="k1")),
        shaping=ShapingSection(whiten=True),
    )


def baseline_preset() -> AlgorithmPreset:
    """Return the composition of REINFORCE++ with a group baseline, freshly made."""
    return AlgorithmPreset(
        advantage=GroupNormalized.Config(normalise_std=False),
        loss=PolicyLoss.Config(kl=KLPenalty.Config(placement="loss", estimator="k2")),
        shaping=ShapingSection(whiten=True),
    )
