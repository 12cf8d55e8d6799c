"""SAPO: a smooth gate on the ratio in place of the clip.

Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv 2511.20347, section 3: temperatures of 1.0 for
positive and 1.05 for other advantages, the mean over each completion and then over completions. No KL.
"""

from __future__ import annotations

from titan_rl.algorithms.advantages import GroupNormalized
from titan_rl.algorithms.aggregations import SampleMeanOfTokenMeans
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import AlgorithmPreset
from titan_rl.algorithms.surrogates import SoftGated


def preset() -> AlgorithmPreset:
    """Return SAPO's composition, freshly made."""
    return AlgorithmPreset(
        advantage=GroupNormalized.Config(),
        loss=PolicyLoss.Config(surrogate=SoftGated.Config(), aggregation=SampleMeanOfTokenMeans.Config()),
    )
