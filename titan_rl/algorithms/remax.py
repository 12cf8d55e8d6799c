"""ReMax: REINFORCE with the reward of the greedy completion as baseline.

Li et al. 2023, "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large
Language Models", arXiv 2310.10505, section 3, algorithm 1. One greedy rollout per prompt is generated beside
the sampled ones; the loss sums a completion's tokens. The paper's KL in the reward is off here.
"""

from __future__ import annotations

from titan_rl.algorithms.advantages import GreedyBaseline
from titan_rl.algorithms.aggregations import SampleMeanOfTokenSums
from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import AlgorithmPreset
from titan_rl.algorithms.surrogates import Reinforce


def preset() -> AlgorithmPreset:
    """Return ReMax's composition, freshly made."""
    return AlgorithmPreset(
        advantage=GreedyBaseline.Config(),
        loss=PolicyLoss.Config(
            surrogate=Reinforce.Config(),
            aggregation=SampleMeanOfTokenSums.Config(),
            kl=KLPenalty.Config(placement="reward", estimator="k1"),
        ),
    )
