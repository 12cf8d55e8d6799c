"""From values per token to one number. Every aggregation divides by a *global* count of the step.

Each returns this micro-batch's share: summed over the micro-batches and ranks of an optimiser step, the
shares are the aggregate over the step, however it was split.

============================  ==========================================  ==================================
function                      weight of a trained token                   also known as
============================  ==========================================  ==================================
token_mean                    1 / trained tokens of the step              token-mean; DAPO, BNPO
sample_mean_of_token_means    1 / (samples x trained tokens of its own)   seq-mean-token-mean; GRPO, GSPO
sample_mean_of_token_sums     1 / samples                                 seq-mean-token-sum
sample_mean_over_constant     1 / (samples x max_tokens)                  seq-mean-token-sum-norm; Dr. GRPO
============================  ==========================================  ==================================
"""

from __future__ import annotations

import torch

from titan_rl.functional.segments import sample_count
from titan_rl.functional.shapes import check_same_shape


def token_mean(
    values: torch.Tensor, loss_mask: torch.Tensor, num_loss_tokens: torch.Tensor | int
) -> torch.Tensor:
    """Sum of the local trained tokens over the global number of trained tokens.

    ``sum_t mask_t values_t / num_loss_tokens``. Summed over the micro-batches and ranks of an optimiser step
    it is the mean over all trained tokens: the token-level loss of Yu et al. 2025 (DAPO, arXiv 2503.14476,
    section 3.3), whatever the split into micro-batches and ranks.

    Args:
        values: Any shape, with grad. What stands at masked tokens, NaN included, has no influence and gets
            a gradient of exactly 0.
        loss_mask: The same shape, bool, True where a token is trained.
        num_loss_tokens: Trained tokens of the optimiser step over all ranks and micro-batches: an int or a
            0-d tensor. 0 counts as 1, so that a globally empty step gives 0 and not NaN.

    Returns:
        A 0-d tensor with grad.

    >>> token_mean(torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([True, True, False]), 4).item()
    0.75
    """
    return _masked_sum(values, loss_mask) / _count(num_loss_tokens, values)


def sample_mean_of_token_means(
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    sample_index: torch.Tensor,
    num_samples: torch.Tensor | int,
) -> torch.Tensor:
    """Mean over the samples of the step of each sample's mean over its trained tokens.

    ``sum_i (sum_t mask_it values_it / |y_i|) / num_samples``: every sample weighs the same, however long.

    Source: the ``1/G sum_i 1/|o_i| sum_t`` of Shao et al. 2024 (GRPO, arXiv 2402.03300, eq. 3).

    Args:
        values: ``[B, T]`` with grad; see :func:`token_mean` for masked tokens.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.
        num_samples: Samples of the optimiser step over all ranks and micro-batches: an int or a 0-d tensor.
            0 counts as 1. A sample without a trained token adds 0 to the sum.

    Returns:
        A 0-d tensor with grad.

    >>> values, mask = torch.tensor([[1.0, 3.0, 5.0]]), torch.tensor([[True, True, True]])
    >>> sample_mean_of_token_means(
    ...     values, mask, sample_index=torch.tensor([[0, 0, 1]]), num_samples=2
    ... ).item()
    3.5
    """
    check_same_shape(values=values, loss_mask=loss_mask, sample_index=sample_index)
    lengths = sample_count(loss_mask, sample_index).clamp(min=1)
    return _masked_sum(values / lengths, loss_mask) / _count(num_samples, values)


def sample_mean_of_token_sums(
    values: torch.Tensor, loss_mask: torch.Tensor, num_samples: torch.Tensor | int
) -> torch.Tensor:
    """Mean over the samples of the step of each sample's sum over its trained tokens.

    ``sum_t mask_t values_t / num_samples``: the policy gradient of the undiscounted return, a long sample
    weighing more. With a ratio per sequence it is the length-weighted loss of Liu et al. 2026 (LUSPO, arXiv
    2602.05261).

    Args:
        values: Any shape, with grad; see :func:`token_mean` for masked tokens.
        loss_mask: The same shape, bool, True where a token is trained.
        num_samples: Samples of the optimiser step over all ranks and micro-batches: an int or a 0-d tensor.
            0 counts as 1.

    Returns:
        A 0-d tensor with grad.

    >>> sample_mean_of_token_sums(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([True, True, True]), 2).item()
    4.5
    """
    return _masked_sum(values, loss_mask) / _count(num_samples, values)


def sample_mean_over_constant(
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    num_samples: torch.Tensor | int,
    max_tokens: int,
) -> torch.Tensor:
    """Sum over the trained tokens, divided by a constant per sample: no bias towards any length.

    ``sum_t mask_t values_t / (num_samples max_tokens)``.

    Source: Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783, section 3.2), whose code divides by the generation
    budget. It differs from :func:`sample_mean_of_token_sums` by a constant, which keeps the loss at the scale
    of a token's.

    Args:
        values: Any shape, with grad; see :func:`token_mean` for masked tokens.
        loss_mask: The same shape, bool, True where a token is trained.
        num_samples: Samples of the optimiser step over all ranks and micro-batches: an int or a 0-d tensor.
            0 counts as 1.
        max_tokens: Longest completion that can be generated, in tokens, >= 1.

    Returns:
        A 0-d tensor with grad.

    >>> values, mask = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([True, True, True])
    >>> sample_mean_over_constant(values, mask, num_samples=2, max_tokens=9).item()
    0.5
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1; got {max_tokens}.")
    return _masked_sum(values, loss_mask) / (_count(num_samples, values) * max_tokens)


def _masked_sum(values: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    check_same_shape(values=values, loss_mask=loss_mask)
    return torch.where(loss_mask, values, 0.0).sum()


def _count(number: torch.Tensor | int, values: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(number, device=values.device).clamp(min=1)
