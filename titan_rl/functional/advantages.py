"""Advantages from rewards: what a rollout was worth against a baseline. No models, no token layout.

Advantages per token are in ``returns``, whitening over a whole batch in ``whitening``.
"""

from __future__ import annotations

import torch

from titan_rl.functional.shapes import check_same_shape


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
    _check_group(rewards)
    centred = _unless_equal(rewards, rewards - rewards.mean())
    return centred / (rewards.std(correction=1) + eps) if normalise_std else centred


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """Reward against the mean of the *other* rollouts of the group.

    ``r_i - sum_{j != i} r_j / (G - 1)``, which is ``G / (G - 1)`` times ``r_i - mean(r)``: the baseline does
    not depend on the rollout itself, so the policy gradient stays unbiased.

    Source: Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; for language models,
    Ahmadian et al. 2024 (RLOO, arXiv 2402.14740).

    Args:
        rewards: ``[G]``, floating point, one value per rollout of a group, G >= 2.

    Returns:
        ``[G]`` advantages; exactly 0 when all rewards are equal.

    Raises:
        ValueError: When ``rewards`` is not a vector of at least 2.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.5, 0.5])).tolist()  # 1 - 1/3, 0 - 2/3, 0.5 - 1.5/3
    [0.6666666865348816, -0.6666666865348816, 0.0, 0.0]
    """
    centred = group_normalized(rewards, normalise_std=False)
    return centred * (rewards.shape[0] / (rewards.shape[0] - 1))


def length_weighted(rewards: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """Reward against the mean of the group weighted by length: ``r_i - sum_j l_j r_j / sum_j l_j``.

    The baseline of least variance when a rollout's squared gradient grows in proportion to its length.

    Source: Hao et al. 2025 (OPO, arXiv 2505.23585).

    Args:
        rewards: ``[G]``, floating point, one value per rollout of a group, G >= 2.
        num_tokens: ``[G]`` trained tokens of each rollout, >= 0; when all are 0 they count as equal.

    Returns:
        ``[G]`` advantages; exactly 0 when all rewards are equal. They do not add up to 0.

    Raises:
        ValueError: When ``rewards`` is not a vector of at least 2, or the shapes differ.

    >>> length_weighted(torch.tensor([1.0, 0.0]), torch.tensor([6, 2])).tolist()
    [0.25, -0.75]
    """
    _check_group(rewards)
    check_same_shape(rewards=rewards, num_tokens=num_tokens)
    lengths = num_tokens.to(rewards.dtype)
    lengths = torch.where(lengths.sum() > 0, lengths, torch.ones_like(lengths))
    return _unless_equal(rewards, rewards - (lengths * rewards).sum() / lengths.sum())


def against_baseline(rewards: torch.Tensor, baseline: float | torch.Tensor) -> torch.Tensor:
    """Reward against that of another rollout of the same prompt, ``r_i - b``.

    Source: Li et al. 2023 (ReMax, arXiv 2310.10505), algorithm 1: b is the reward of the greedy completion.

    Args:
        rewards: ``[G]``, floating point, G >= 1.
        baseline: A number, or a 0-d tensor.

    Returns:
        ``[G]`` advantages.

    >>> against_baseline(torch.tensor([1.0, 0.25]), 0.5).tolist()
    [0.5, -0.25]
    """
    return rewards - baseline


def best_of_group(rewards: torch.Tensor) -> torch.Tensor:
    """Only the best rollout of a group learns: its reward against the second best, 0 for all others.

    ``(r_max - r_second) 1[i = argmax]``, an unbiased gradient of the expected best reward of G rollouts.

    Source: Tang et al. 2025 (arXiv 2503.19595), leave-one-out form; verl's "grpo_passk". With a tie for the
    best all advantages are 0.

    Args:
        rewards: ``[G]``, floating point, one value per rollout of a group, G >= 2.

    Returns:
        ``[G]`` advantages, none negative.

    Raises:
        ValueError: When ``rewards`` is not a vector of at least 2.

    >>> best_of_group(torch.tensor([0.25, 1.0, 0.5])).tolist()
    [0.0, 0.5, 0.0]
    """
    _check_group(rewards)
    best, second = rewards.topk(2).values
    return torch.where(rewards == best, best - second, torch.zeros_like(rewards))


def _check_group(rewards: torch.Tensor) -> None:
    if rewards.ndim != 1 or rewards.shape[0] < 2:
        raise ValueError(f"rewards must be a vector of at least 2; got shape {tuple(rewards.shape)}.")


def _unless_equal(rewards: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    # The mean of equal numbers can be off by a rounding, which dividing by a tiny deviation would blow up.
    return torch.where(rewards.amax() == rewards.amin(), 0.0, advantages)
