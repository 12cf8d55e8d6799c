"""GRPO: group relative policy optimisation.

Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
arXiv 2402.03300, section 4.1, eq. 3 with the advantage of section 4.1.2 (outcome supervision) and the KL
estimator of eq. 4. Two departures, both what TRL's and verl's users get today:

* the mean is taken over all trained tokens of the step, not per completion first (eq. 3's ``1/|o_i|``), which
  weights a token of a long completion less (Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.3);
* the KL coefficient is 0, so no reference model is held. The paper's is 0.04: ``loss.kl.coefficient = 0.04``.
"""

from __future__ import annotations

from titan_rl.algorithms.advantages import GroupNormalized
from titan_rl.algorithms.aggregations import TokenMean
from titan_rl.algorithms.corrections import NoCorrection
from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import AlgorithmPreset
from titan_rl.algorithms.ratios import TokenRatio
from titan_rl.algorithms.surrogates import Clipped


def preset() -> AlgorithmPreset:
    """Return GRPO's composition, freshly made: changing it changes no other run.

    >>> preset().loss.surrogate.clip_low
    0.2
    """
    return AlgorithmPreset(
        advantage=GroupNormalized.Config(normalise_std=True, eps=1e-6),
        loss=PolicyLoss.Config(
            ratio=TokenRatio.Config(),
            surrogate=Clipped.Config(clip_low=0.2, clip_high=0.2),
            correction=NoCorrection.Config(),
            aggregation=TokenMean.Config(),
            kl=KLPenalty.Config(estimator="k3", coefficient=0.0),
        ),
    )
