"""PPO with a critic: advantages per token from a learned value, the clipped surrogate, a KL in the reward.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv 1707.06347, eq. 7, with generalised
advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16). gamma = lambda = 1, verl's and
slime's defaults, makes the returns Monte-Carlo ones; the paper has 0.99 and 0.95. Advantages are whitened
over the batch. The KL penalty per token in the reward, as in RLHF (Ouyang et al. 2022, arXiv 2203.02155,
section 3.5), has coefficient 0 here: set ``loss.kl.coefficient``. The critic is ``[critic]``.

Dual-clip PPO bounds the loss of negative advantages too (Ye et al. 2020, arXiv 1912.09729, eq. 5, c = 3).
"""

from __future__ import annotations

from titan_rl.algorithms.advantages import GAE
from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import AlgorithmPreset
from titan_rl.algorithms.shaping import ShapingSection
from titan_rl.algorithms.surrogates import Clipped


def preset() -> AlgorithmPreset:
    """Return PPO's composition, freshly made."""
    return _preset(Clipped.Config(clip_low=0.2, clip_high=0.2))


def dual_clip_preset() -> AlgorithmPreset:
    """Return the composition of PPO with a dual clip, freshly made."""
    return _preset(Clipped.Config(clip_low=0.2, clip_high=0.2, clip_dual=3.0))


def _preset(surrogate: Clipped.Config) -> AlgorithmPreset:
    return AlgorithmPreset(
        advantage=GAE.Config(),
        loss=PolicyLoss.Config(surrogate=surrogate, kl=KLPenalty.Config(placement="reward", estimator="k1")),
        shaping=ShapingSection(whiten=True),
    )
