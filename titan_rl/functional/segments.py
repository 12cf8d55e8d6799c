"""Sums over the samples of packed rows, handed back to every token of the sample.

A micro-batch packs several samples into a row, so whatever is defined per sample (a ratio of sequences, a
mean per sample, a rejection) is a reduction over the segments that ``sample_index`` marks. All results are
``[B, T]``: shapes never depend on how many samples there are, which is what ``torch.compile`` wants.
Reductions over ranks are the caller's business.

On CUDA the sums are atomic additions: bit for bit reproducible with
``torch.use_deterministic_algorithms(True)``, up to rounding without.
"""

from __future__ import annotations

import torch

from titan_rl.functional.shapes import check_same_shape


def row_segments(sample_index: torch.Tensor) -> torch.Tensor:
    """Number the runs of equal values in each row: 0, 1, 2, ... from the left.

    Args:
        sample_index: ``[B, T]`` int64. A sample lies in one row, its tokens next to one another.

    Returns:
        ``[B, T]`` int64 in ``0..T-1``; the padding is a run of its own.

    >>> row_segments(torch.tensor([[7, 7, 2, -1, -1], [5, 5, 5, 5, -1]])).tolist()
    [[0, 0, 1, 2, 2], [0, 0, 0, 0, 1]]
    """
    if sample_index.ndim != 2:
        raise ValueError(f"sample_index must be [B, T]; got shape {tuple(sample_index.shape)}.")
    changes = sample_index[:, 1:] != sample_index[:, :-1]
    return torch.nn.functional.pad(changes.to(torch.int64).cumsum(dim=1), (1, 0))


def sample_sum(values: torch.Tensor, loss_mask: torch.Tensor, sample_index: torch.Tensor) -> torch.Tensor:
    """Sum over the trained tokens of each sample, at every token of the sample.

    Args:
        values: ``[B, T]``, with or without grad. What stands outside ``loss_mask``, NaN included, has no
            influence and gets a gradient of exactly 0.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.

    Returns:
        ``[B, T]``: at every token of a sample, prompt included, that sample's sum; 0 in the padding.

    Raises:
        ValueError: When the shapes differ or are not ``[B, T]``.

    >>> values = torch.tensor([[float("nan"), 1.0, 2.0, 5.0, 9.0]])
    >>> mask = torch.tensor([[False, True, True, True, False]])
    >>> sample_sum(values, mask, torch.tensor([[0, 0, 0, 1, -1]])).tolist()
    [[3.0, 3.0, 3.0, 5.0, 0.0]]
    """
    check_same_shape(values=values, loss_mask=loss_mask, sample_index=sample_index)
    segments = row_segments(sample_index)
    selected = torch.where(loss_mask, values, torch.zeros_like(values))
    return torch.zeros_like(selected).scatter_add(1, segments, selected).gather(1, segments)


def sample_count(loss_mask: torch.Tensor, sample_index: torch.Tensor) -> torch.Tensor:
    """Number of trained tokens of each sample, at every token of the sample.

    Args:
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.

    Returns:
        ``[B, T]`` int64; 0 for a sample without a trained token and in the padding.

    >>> mask = torch.tensor([[False, True, True, True, False]])
    >>> sample_count(mask, torch.tensor([[0, 0, 0, 1, -1]])).tolist()
    [[2, 2, 2, 1, 0]]
    """
    return sample_sum(loss_mask.to(torch.int64), loss_mask, sample_index)


def sample_mean(values: torch.Tensor, loss_mask: torch.Tensor, sample_index: torch.Tensor) -> torch.Tensor:
    """Mean over the trained tokens of each sample, at every token of the sample.

    Args:
        values: ``[B, T]`` floating point, with or without grad; see :func:`sample_sum`.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.

    Returns:
        ``[B, T]``; 0 for a sample without a trained token and in the padding.

    >>> values, mask = torch.tensor([[9.0, 1.0, 2.0, 5.0]]), torch.tensor([[False, True, True, True]])
    >>> sample_mean(values, mask, torch.tensor([[0, 0, 0, 1]])).tolist()
    [[1.5, 1.5, 1.5, 5.0]]
    """
    return sample_sum(values, loss_mask, sample_index) / sample_count(loss_mask, sample_index).clamp(min=1)


def is_last_trained(loss_mask: torch.Tensor, sample_index: torch.Tensor) -> torch.Tensor:
    """Mark the last trained token of each sample: where the reward of a rollout belongs.

    Args:
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.

    Returns:
        ``[B, T]`` bool, True at one token of every sample that has a trained token.

    >>> mask = torch.tensor([[False, True, True, False, True, False]])
    >>> is_last_trained(mask, torch.tensor([[0, 0, 0, 0, 1, -1]])).int().tolist()
    [[0, 0, 1, 0, 1, 0]]
    """
    check_same_shape(loss_mask=loss_mask, sample_index=sample_index)
    segments = row_segments(sample_index)
    position = torch.arange(loss_mask.shape[1], device=loss_mask.device).expand_as(segments)
    trained = torch.where(loss_mask, position, -1)
    last = torch.full_like(segments, -1).scatter_reduce(1, segments, trained, "amax").gather(1, segments)
    return loss_mask & (position == last)
