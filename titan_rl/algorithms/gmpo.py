"""GMPO: the geometric mean of a completion's token ratios, each clipped on its own.

Zhao et al. 2025, "Geometric-Mean Policy Optimization", arXiv 2507.20673, eq. 4: bounds of exp(-0.4) and
exp(0.4) on a token's ratio, the mean over completions. No KL.
"""

from __future__ import annotations

from titan_rl.algorithms.advantages import GroupNormalized
from titan_rl.algorithms.aggregations import SampleMeanOfTokenMeans
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import AlgorithmPreset
from titan_rl.algorithms.surrogates import GeometricMean


def preset() -> AlgorithmPreset:
    """Return GMPO's composition, freshly made."""
    return AlgorithmPreset(
        advantage=GroupNormalized.Config(),
        loss=PolicyLoss.Config(surrogate=GeometricMean.Config(), aggregation=SampleMeanOfTokenMeans.Config()),
    )
