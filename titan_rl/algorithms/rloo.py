"""RLOO: REINFORCE with the mean of the siblings' rewards as baseline.

Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human
Feedback in LLMs", arXiv 2402.14740, the estimator "REINFORCE Leave-One-Out" there, after Kool et al. 2019.
The whole completion is one action: the loss sums its tokens and averages over samples. The paper puts the KL
into the reward, which is off here until ``loss.kl.coefficient`` is set.
"""

from __future__ import annotations

from titan_rl.algorithms.advantages import LeaveOneOut
from titan_rl.algorithms.aggregations import SampleMeanOfTokenSums
from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import AlgorithmPreset
from titan_rl.algorithms.surrogates import Reinforce


def preset() -> AlgorithmPreset:
    """Return RLOO's composition, freshly made."""
    return AlgorithmPreset(
        advantage=LeaveOneOut.Config(),
        loss=PolicyLoss.Config(
            surrogate=Reinforce.Config(),
            aggregation=SampleMeanOfTokenSums.Config(),
            kl=KLPenalty.Config(placement="reward", estimator="k1"),
        ),
    )
