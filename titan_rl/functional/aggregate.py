"""From values per token to one number. Every aggregation divides by a *global* count of the step."""

from __future__ import annotations

import torch

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
    check_same_shape(values=values, loss_mask=loss_mask)
    total = torch.where(loss_mask, values, 0.0).sum()
    return total / torch.as_tensor(num_loss_tokens, device=values.device).clamp(min=1)
