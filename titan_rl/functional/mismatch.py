"""How far the generator's log-probabilities are from the policy's at equal weights.

They come from two engines, so they differ even for the same weights; more than rounding means a bug or a
generator that serves other weights. Correcting for it is an algorithm's business.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from titan_rl.functional.kl import k3
from titan_rl.functional.shapes import check_same_shape


class MismatchSums(NamedTuple):
    """0-d tensors to be reduced over micro-batches and ranks: sums by a sum, ``abs_max`` by a maximum."""

    num_tokens: torch.Tensor
    """int64, number of tokens compared."""
    abs_sum: torch.Tensor
    """Sum of ``|policy - generator|``, nats."""
    abs_max: torch.Tensor
    """Largest ``|policy - generator|``, nats; 0 without tokens."""
    k3_sum: torch.Tensor
    """Sum of the k3 estimates of ``KL(generator || policy)``, nats."""


def mismatch_sums(
    policy_logprobs: torch.Tensor, generator_logprobs: torch.Tensor, mask: torch.Tensor
) -> MismatchSums:
    """Compare two sets of log-probabilities of the generator's own tokens.

    With ``d = policy - generator``: sums of ``|d|`` and of ``exp(d) - 1 - d``, which estimates
    ``KL(generator || policy)`` because the tokens were sampled from the generator (Schulman 2020,
    "Approximating KL Divergence", k3), and the maximum of ``|d|``.

    Args:
        policy_logprobs: Any shape, natural logarithms, as the trainer computes them. Detached here.
        generator_logprobs: The same shape, as the generator reported them.
        mask: The same shape, bool, True for the tokens to compare.

    Returns:
        Sums and a maximum over the tokens under the mask, no grad.

    >>> policy, generator = torch.tensor([-1.0, -2.0, 0.0]), torch.tensor([-1.5, -1.0, 9.0])
    >>> sums = mismatch_sums(policy, generator, torch.tensor([True, True, False]))
    >>> sums.num_tokens.item(), sums.abs_sum.item(), sums.abs_max.item()
    (2, 1.5, 1.0)
    """
    check_same_shape(policy_logprobs=policy_logprobs, generator_logprobs=generator_logprobs, mask=mask)
    policy = torch.where(mask, policy_logprobs.detach(), 0.0)
    generator = torch.where(mask, generator_logprobs.detach(), 0.0)
    difference = (policy - generator).abs()
    return MismatchSums(
        num_tokens=mask.sum(),
        abs_sum=difference.sum(),
        abs_max=difference.amax() if mask.numel() else difference.new_zeros(()),
        k3_sum=k3(generator, policy).sum(),
    )
