"""The critic's loss, and the running statistics that its targets are normalised with.

The targets themselves are in ``returns``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from titan_rl.functional.shapes import check_same_shape


class ValueLoss(NamedTuple):
    """A squared error per token."""

    loss: torch.Tensor
    """Of the shape of the arguments, with grad."""
    is_clipped: torch.Tensor
    """bool, True where the bound took the gradient away."""


class RunningMoments(NamedTuple):
    """Mean and spread of all numbers seen so far, as float64 0-d tensors: small enough to checkpoint."""

    count: torch.Tensor
    """How many numbers."""
    mean: torch.Tensor
    """Their mean."""
    squared_deviations: torch.Tensor
    """Sum of their squared deviations from it (M2)."""

    @classmethod
    def empty(cls) -> RunningMoments:
        """Nothing seen yet: normalising leaves values as they are."""
        return cls(*(torch.zeros((), dtype=torch.float64) for _ in range(3)))


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip: float | None = None
) -> ValueLoss:
    r"""Half the squared error, or that of a value kept near the old one if it is larger.

    .. math:: \tfrac12 \max\big((V - R)^2, (\mathrm{clip}(V, V_{old} - \epsilon, V_{old} + \epsilon) -
    R)^2\big)

    Source: the value clipping of PPO's reference implementation (Dhariwal et al. 2017, "OpenAI Baselines");
    the half and the maximum are verl's, TRL's and OpenRLHF's too. Without ``clip`` it is the squared error of
    Schulman et al. 2017 (arXiv 1707.06347), eq. 9, halved.

    Args:
        values: Any shape, with grad.
        old_values: The same shape, no grad: the critic's values at the start of the iteration.
        returns: The same shape, no grad: what the critic is trained towards.
        clip: How far a value may move from the old one, in units of reward, > 0; None for no bound.

    Returns:
        The loss of each token, with grad, and where its gradient is 0 because the value has moved away from
        the old one, beyond the bound, towards the return.

    >>> values, old = torch.tensor([1.5, 0.5, 1.5]), torch.tensor([1.0, 1.0, 1.0])
    >>> loss, is_clipped = clipped_value_loss(values, old, torch.tensor([2.0, 2.0, 0.0]), clip=0.25)
    >>> loss.tolist(), is_clipped.tolist()
    ([0.28125, 1.125, 1.125], [True, False, False])
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    error = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * error, torch.zeros_like(error, dtype=torch.bool))
    if not clip > 0:
        raise ValueError(f"clip must be above 0; got {clip}.")
    moved = values.detach() - old_values
    bounded = (old_values + moved.clamp(-clip, clip) - returns).square()
    # Inside the bound both errors are equal but for rounding, which must not cost the gradient.
    is_clipped = (moved.abs() > clip) & (bounded > error.detach())
    return ValueLoss(0.5 * torch.where(is_clipped, bounded, error), is_clipped)


def updated_moments(
    moments: RunningMoments, *, count: float, total: float, total_of_squares: float
) -> RunningMoments:
    """The moments after a batch of numbers, given by its sums over all ranks.

    Source: the pairwise update of Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm
    for computing sample variances"; the result does not depend on how the batch was split.

    Args:
        moments: Of everything before.
        count: How many numbers the batch has, over all ranks.
        total: Their sum (:func:`titan_rl.functional.whitening.whitening_sums`).
        total_of_squares: The sum of their squares.

    Returns:
        The moments of everything; the argument when ``count`` is 0.

    >>> moments = updated_moments(RunningMoments.empty(), count=2, total=4.0, total_of_squares=10.0)
    >>> moments = updated_moments(moments, count=1, total=5.0, total_of_squares=25.0)
    >>> moments.count.item(), moments.mean.item(), moments.squared_deviations.item()
    (3.0, 3.0, 8.0)
    """
    if count <= 0:
        return moments
    batch_mean = total / count
    batch_deviations = max(total_of_squares - count * batch_mean * batch_mean, 0.0)
    difference = batch_mean - moments.mean
    whole = moments.count + count
    return RunningMoments(
        count=whole,
        mean=moments.mean + difference * (count / whole),
        squared_deviations=(
            moments.squared_deviations
            + batch_deviations
            + difference.square() * (moments.count * (count / whole))
        ),
    )


def standard_deviation(moments: RunningMoments, *, eps: float = 1e-8) -> torch.Tensor:
    """``sqrt(M2 / (n - 1) + eps)``, or 1 before two numbers were seen; a 0-d float64 tensor.

    >>> moments = RunningMoments(*(torch.tensor(x, dtype=torch.float64) for x in (3.0, 3.0, 8.0)))
    >>> round(standard_deviation(moments).item(), 6)
    2.0
    """
    variance = moments.squared_deviations / (moments.count - 1.0).clamp(min=1.0)
    return torch.where(moments.count > 1, (variance + eps).sqrt(), 1.0)


def normalised(returns: torch.Tensor, moments: RunningMoments) -> torch.Tensor:
    """``(returns - mean) / std``: what a critic with normalised outputs is trained towards.

    Source: the normalised targets of van Hasselt et al. 2016 (arXiv 1602.07714), with moments over all data
    instead of an exponential window.

    Args:
        returns: Any shape, in units of reward.
        moments: Of the returns seen so far.

    Returns:
        The same shape and dtype.
    """
    mean, deviation = _like(returns, moments)
    return (returns - mean) / deviation


def denormalised(values: torch.Tensor, moments: RunningMoments) -> torch.Tensor:
    """``values * std + mean``: the critic's outputs in units of reward, the inverse of :func:`normalised`.

    Args:
        values: Any shape, in standard deviations.
        moments: Those that the targets were normalised with.

    Returns:
        The same shape and dtype.

    >>> moments = updated_moments(RunningMoments.empty(), count=3, total=9.0, total_of_squares=35.0)
    >>> [round(x, 4) for x in denormalised(torch.tensor([0.0, 1.0]), moments).tolist()]
    [3.0, 5.0]
    """
    mean, deviation = _like(values, moments)
    return values * deviation + mean


def output_preserving_scale(
    before: RunningMoments, after: RunningMoments
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""How to change the critic's last layer so that its values in units of reward stay what they were.

    .. math:: w' = w \frac{\sigma}{\sigma'}, \quad b' = b \frac{\sigma}{\sigma'} + \frac{\mu - \mu'}{\sigma'}

    Source: van Hasselt et al. 2016 (Pop-Art, arXiv 1602.07714), Proposition 1.

    Args:
        before: The moments that the layer was trained with.
        after: The moments that it will be read with.

    Returns:
        ``sigma / sigma'``, which multiplies weight and bias, and ``(mu - mu') / sigma'``, which is then added
        to the bias; 0-d float64 tensors.
    """
    new_deviation = standard_deviation(after)
    return standard_deviation(before) / new_deviation, (before.mean - after.mean) / new_deviation


def _like(values: torch.Tensor, moments: RunningMoments) -> tuple[torch.Tensor, torch.Tensor]:
    deviation = standard_deviation(moments)
    return moments.mean.to(values.device, values.dtype), deviation.to(values.device, values.dtype)
