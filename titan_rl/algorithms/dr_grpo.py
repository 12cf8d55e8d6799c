"""Dr. GRPO: GRPO without its two biases, of length and of difficulty.

Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv 2503.20783, section 3.2:
the group's rewards are centred and not divided by their deviation, and the loss is divided by a constant per
sample instead of its length. No KL, as there.
"""

from __future__ import annotations

from titan_rl.algorithms.advantages import GroupNormalized
from titan_rl.algorithms.aggregations import SampleMeanOverConstant
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import AlgorithmPreset


def preset() -> AlgorithmPreset:
    """Return Dr. GRPO's composition, freshly made."""
    return AlgorithmPreset(
        advantage=GroupNormalized.Config(normalise_std=False),
        loss=PolicyLoss.Config(aggregation=SampleMeanOverConstant.Config()),
    )
