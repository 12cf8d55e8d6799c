"""Per-token policy losses from a ratio and an advantage. Sums over tokens are in ``aggregate``."""

from __future__ import annotations

import torch

from titan_rl.functional.shapes import check_same_shape


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss ``-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)`` of PPO, a value per token.

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7, negated because we minimise. Two bounds instead of
    one are "clip-higher" of Yu et al. 2025 (DAPO, arXiv 2503.14476, section 3.1). There is no third, dual
    bound (Ye et al. 2020, arXiv 1912.09729), which verl applies by default.

    A token is clipped where the minimum takes the clipped branch and that is smaller: ``A > 0`` and
    ``ratio > 1 + clip_high``, or ``A < 0`` and ``ratio < 1 - clip_low``. Its gradient is exactly 0.

    Args:
        ratio: Any shape, policy against old policy, with grad.
        advantages: The same shape, no grad.
        clip_low: How far below 1 the ratio may go, in [0, 1].
        clip_high: How far above 1 the ratio may go, >= 0.

    Returns:
        The loss of each token, with grad; True where it is clipped at the lower bound; True where at the
        upper bound.

    >>> loss, low, high = clipped_surrogate(
    ...     torch.tensor([1.5, 0.5, 1.5]), torch.tensor([1.0, -1.0, -1.0]), clip_low=0.2, clip_high=0.25
    ... )
    >>> [round(x, 3) for x in loss.tolist()], low.tolist(), high.tolist()
    ([-1.25, 0.8, 1.5], [False, True, False], [True, False, False])
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    is_clipped_low = (advantages < 0) & (ratio < 1.0 - clip_low)
    is_clipped_high = (advantages > 0) & (ratio > 1.0 + clip_high)
    clipped = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.where(is_clipped_low | is_clipped_high, clipped, ratio) * advantages
    return loss, is_clipped_low, is_clipped_high
