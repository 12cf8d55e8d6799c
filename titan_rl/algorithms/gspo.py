"""GSPO: the importance ratio of the whole sequence, clipped as one.

Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv 2507.18071, eq. 5 to 7: a length-normalised
ratio per sequence, bounds of 3e-4 and 4e-4 (section 5.1), the mean over sequences. No KL. The gradient is
that of GSPO-token (eq. 13 and 14), which is the same for one advantage per sample.
"""

from __future__ import annotations

from titan_rl.algorithms.advantages import GroupNormalized
from titan_rl.algorithms.aggregations import SampleMeanOfTokenMeans
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import AlgorithmPreset
from titan_rl.algorithms.ratios import SequenceRatio
from titan_rl.algorithms.surrogates import Clipped


def preset() -> AlgorithmPreset:
    """Return GSPO's composition, freshly made."""
    return AlgorithmPreset(
        advantage=GroupNormalized.Config(),
        loss=PolicyLoss.Config(
            ratio=SequenceRatio.Config(),
            surrogate=Clipped.Config(clip_low=3e-4, clip_high=4e-4),
            aggregation=SampleMeanOfTokenMeans.Config(),
        ),
    )
