"""On-policy distillation: the policy samples, a teacher says how likely each token should have been.

Agarwal et al. 2024, "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
arXiv 2306.13649, section 3.1: GKD's objective with lambda = 1, which is eq. 4 there with the reverse KL in
place of the forward one, at every token that the policy sampled, over the whole vocabulary; Gu et al. 2024
(MiniLLM, arXiv 2306.08543) for the direction. Rewards are logged and not used.
"""

from __future__ import annotations

from titan_rl.algorithms.advantages import NoAdvantage
from titan_rl.algorithms.penalties import Distillation
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import AlgorithmPreset


def preset() -> AlgorithmPreset:
    """Return the composition of on-policy distillation, freshly made."""
    return AlgorithmPreset(
        advantage=NoAdvantage.Config(),
        loss=PolicyLoss.Config(distillation=Distillation.Config(coefficient=1.0)),
    )
