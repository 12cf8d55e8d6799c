"""Advantages from rewards: what a rollout was worth against a baseline. No models, no token layout."""

from __future__ import annotations

import torch


def group_normalized(rewards: torch.Tensor, *, normalise_std: bool = True, eps: float = 1e-6) -> torch.Tensor:
    """Reward against the mean of its siblings, in units of their standard deviation.

    ``(r_i - mean(r)) / (std(r) + eps)``, or ``r_i - mean(r)`` without ``normalise_std``.

    Source: GRPO, Shao et al. 2024 (arXiv 2402.03300), section 4.1.2. The paper leaves two things open: the
    standard deviation is Bessel-corrected here (divisor G - 1), as in verl and TRL, and eps is 1e-6, verl's
    value. Without the division it is the advantage of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783).

    Args:
        rewards: ``[G]``, floating point, one value per rollout of a group, G >= 2.
        normalise_std: Whether to divide by the standard deviation.
        eps: Added to the standard deviation, > 0.

    Returns:
        ``[G]`` advantages; exactly 0 when all rewards are equal.

    Raises:
        ValueError: When ``rewards`` is not a vector of at least 2.

    >>> group_normalized(torch.tensor([1.0, 0.0, 0.0, 1.0]), normalise_std=False).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    if rewards.ndim != 1 or rewards.shape[0] < 2:
        raise ValueError(f"rewards must be a vector of at least 2; got shape {tuple(rewards.shape)}.")
    centred = rewards - rewards.mean()
    # The mean of equal numbers can be off by a rounding, which dividing by a tiny deviation would blow up.
    centred = torch.where(rewards.amax() == rewards.amin(), 0.0, centred)
    return centred / (rewards.std(correction=1) + eps) if normalise_std else centred
