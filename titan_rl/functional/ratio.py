"""Importance ratios between the policy and the old policy. Clipping them is in ``surrogate``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from titan_rl.functional.shapes import check_same_shape

LOG_RATIO_BOUND = 20.0
"""Log-ratios are bounded by this (nats): exp(20) = 4.9e8 is finite in fp32, exp(100) is not."""


class Ratio(NamedTuple):
    """An importance ratio, a value per token."""

    ratio: torch.Tensor
    """In (0, 4.9e8], with grad."""
    log_ratio: torch.Tensor
    """Its logarithm in nats, in [-20, 20], with grad."""
    is_clamped: torch.Tensor
    """bool, True where the logarithm had to be bounded. The gradient is 0 there, so count and log it."""


def token_ratio(policy_logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> Ratio:
    """Probability ratio of each token, ``exp(policy_logprobs - old_logprobs)``, overflow made safe.

    Source: ``r_t`` of Schulman et al. 2017 (arXiv 1707.06347), section 3. We bound the log-ratio to ±20, as
    verl does; other frameworks bound it to 10 or not at all.

    Args:
        policy_logprobs: Any shape, natural logarithms, with grad.
        old_logprobs: The same shape, no grad.

    Returns:
        The ratio, its logarithm and where that was bounded, each of the same shape.

    >>> ratio, log_ratio, is_clamped = token_ratio(torch.tensor([-1.0, -0.5]), torch.tensor([-1.5, -100.0]))
    >>> [f"{x:.5g}" for x in ratio.tolist()], log_ratio.tolist(), is_clamped.tolist()
    (['1.6487', '4.8517e+08'], [0.5, 20.0], [False, True])
    """
    check_same_shape(policy_logprobs=policy_logprobs, old_logprobs=old_logprobs)
    difference = policy_logprobs - old_logprobs
    log_ratio = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return Ratio(log_ratio.exp(), log_ratio, difference.detach().abs() > LOG_RATIO_BOUND)
