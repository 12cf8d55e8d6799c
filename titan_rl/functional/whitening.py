"""Whitening over tokens that lie in many micro-batches and ranks: local sums first, then the shift."""

from __future__ import annotations

import math

import torch

from titan_rl.functional.shapes import check_same_shape


def whitening_sums(values: torch.Tensor, mask: torch.Tensor) -> tuple[float, float, float]:
    """Count, sum and sum of squares of the values under the mask, to be added up over ranks.

    Args:
        values: Any shape, no grad.
        mask: The same shape, bool.

    >>> whitening_sums(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
    (2.0, 4.0, 10.0)
    """
    check_same_shape(values=values, mask=mask)
    chosen = values[mask].double()
    return float(chosen.numel()), float(chosen.sum()), float(chosen.square().sum())


def whiten(
    values: torch.Tensor, mask: torch.Tensor, *sums: float, shift_mean: bool = True, eps: float = 1e-8
) -> torch.Tensor:
    r"""Values of mean 0 and variance 1 over all tokens that the sums were taken over.

    ``(x - mean) / sqrt(var + eps)`` with the Bessel-corrected variance and eps inside the root, as verl
    does. OpenRLHF divides by the count and bounds the variance below by 1e-8 instead.

    Args:
        values: Any shape, no grad.
        mask: The same shape, bool; 0 outside it.
        *sums: Count, sum and sum of squares over all ranks and micro-batches (:func:`whitening_sums`).
        shift_mean: Whether to subtract the mean; otherwise only the scale changes.
        eps: Added to the variance, > 0.

    Returns:
        The same shape. With fewer than two values the variance counts as 0.

    >>> values, mask = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])
    >>> [round(x, 4) for x in whiten(values, mask, 2.0, 4.0, 10.0).tolist()]
    [-0.7071, 0.7071, 0.0]
    """
    check_same_shape(values=values, mask=mask)
    count, total, square = sums
    mean = total / max(count, 1.0)
    variance = max(square - count * mean * mean, 0.0) / max(count - 1.0, 1.0)
    scaled = (values - mean if shift_mean else values) / math.sqrt(variance + eps)
    return torch.where(mask, scaled, 0.0)
