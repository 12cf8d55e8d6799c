"""DAPO: GRPO with a higher upper bound, a token-level loss, dynamic sampling and a punishment of length.

Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476,
section 3: clip-higher (0.2 and 0.28), the mean over all tokens, groups of equal rewards replaced, no KL.
Overlong shaping (``shaping.overlong_buffer_tokens``) and filtering (``shaping.mask_truncated``) are off,
because their lengths are the task's: the paper uses 4096 of 20480 tokens.
"""

from __future__ import annotations

from titan_rl.algorithms.advantages import GroupNormalized
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import AlgorithmPreset
from titan_rl.algorithms.refill import RefillSection
from titan_rl.algorithms.surrogates import Clipped


def preset() -> AlgorithmPreset:
    """Return DAPO's composition, freshly made."""
    return AlgorithmPreset(
        advantage=GroupNormalized.Config(),
        loss=PolicyLoss.Config(surrogate=Clipped.Config(clip_low=0.2, clip_high=0.28)),
        # A round draws only what is missing, so the last groups may take many small ones.
        refill=RefillSection(max_rounds=30),
    )
