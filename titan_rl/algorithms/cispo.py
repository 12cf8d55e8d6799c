"""CISPO: the importance weight is bounded, not the update, so every token keeps a gradient.

MiniMax 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", arXiv 2506.13585,
eq. 4 and 5: only an upper bound on the weight, the mean over all tokens, no KL. The paper does not state the
bound. 0.28, a largest weight of 1.28, is borrowed from DAPO's ``clip_high``.
"""

from __future__ import annotations

from titan_rl.algorithms.advantages import GroupNormalized
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import AlgorithmPreset
from titan_rl.algorithms.surrogates import ClippedWeight


def preset() -> AlgorithmPreset:
    """Return CISPO's composition, freshly made."""
    return AlgorithmPreset(
        advantage=GroupNormalized.Config(),
        loss=PolicyLoss.Config(surrogate=ClippedWeight.Config(clip_low=1.0, clip_high=0.28)),
    )
