"""Policy losses in which every token of a sample depends on the whole sample.

They are written per token, so that any aggregation applies; each says which one its paper uses.
"""

from __future__ import annotations

import torch

from titan_rl.functional.segments import sample_mean, sample_sum
from titan_rl.functional.shapes import check_same_shape
from titan_rl.functional.surrogate import TokenLoss


def geometric_mean_surrogate(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    loss_mask: torch.Tensor,
    sample_index: torch.Tensor,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLoss:
    r"""Minus the advantage times the geometric mean of the sample's token ratios, each clipped on its own.

    .. math:: -A_t \exp\Big(\frac{1}{|y|} \sum_u l_u\Big), \quad
       l_u = \begin{cases} \min(\log r_u, \epsilon_{high}) & A_u > 0 \\
       \max(\log r_u, -\epsilon_{low}) & A_u < 0 \end{cases}

    Bounds are in log space: the paper's (e^-0.4, e^0.4) is 0.4 on both sides. A clipped token gets no
    gradient through its own ratio.

    Source: Zhao et al. 2025 (GMPO, arXiv 2507.20673), eq. 4, with
    :func:`~titan_rl.functional.aggregate.sample_mean_of_token_means`. verl ("geo_mean") gives
    ``A (prod_u ...)^(1/|y|)`` the sample's mean advantage, which this equals for one advantage per sample.

    Args:
        log_ratio: ``[B, T]`` nats, policy against old policy, with grad.
        advantages: ``[B, T]``, no grad.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.
        clip_low: How far below 0 the log-ratio of a token may go, nats, >= 0.
        clip_high: How far above 0, nats, >= 0.

    Returns:
        ``[B, T]`` loss with grad, and which tokens' own ratios are clipped.

    >>> log_ratio, advantages = torch.tensor([[1.0, -0.4]]), torch.tensor([[1.0, 1.0]])
    >>> mask, index = torch.tensor([[True, True]]), torch.tensor([[0, 0]])
    >>> loss, low, high = geometric_mean_surrogate(log_ratio, advantages, loss_mask=mask, sample_index=index)
    >>> loss.tolist(), high.tolist()  # exp((0.4 - 0.4) / 2)
    ([[-1.0, -1.0]], [[True, False]])
    """
    check_same_shape(log_ratio=log_ratio, advantages=advantages, loss_mask=loss_mask)
    is_clipped_low = loss_mask & (advantages < 0) & (log_ratio < -clip_low)
    is_clipped_high = loss_mask & (advantages > 0) & (log_ratio > clip_high)
    clipped = log_ratio.detach().clamp(-clip_low, clip_high)
    log_ratio = torch.where(is_clipped_low | is_clipped_high, clipped, log_ratio)
    ratio = sample_mean(log_ratio, loss_mask, sample_index).exp()
    return TokenLoss(-ratio * advantages, is_clipped_low, is_clipped_high)


def gamma_weighted_surrogate(
    policy_logprobs: torch.Tensor,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    loss_mask: torch.Tensor,
    sample_index: torch.Tensor,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> TokenLoss:
    r"""``-sg[phi(W)] A log p`` with a smooth weight of the whole sequence's importance ratio.

    .. math:: \phi(W) = W^k e^{\lambda (1 - W)}, \quad W = \prod_t r_t, \quad \phi(1) = 1

    with one (k, lambda) where ``A >= 0`` and another elsewhere. There is no length normalisation: phi falls
    to 0 for sequences far from the old policy on either side.

    Source: Shen et al. 2026 (VESPO, arXiv 2602.10693); the defaults are TRL's. As TRL, we bound log W to
    [log 1e-8, 20]. TRL averages over tokens (:func:`~titan_rl.functional.aggregate.token_mean`).

    Args:
        policy_logprobs: ``[B, T]`` natural logarithms, with grad.
        log_ratio: ``[B, T]`` nats, policy against old policy; its gradient is not used.
        advantages: ``[B, T]``, no grad.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.
        k_positive: Power of W where the advantage is not negative.
        lambda_positive: Decay rate there.
        k_negative: Power of W where the advantage is negative.
        lambda_negative: Decay rate there.

    Returns:
        ``[B, T]`` loss with grad; the flags are False everywhere.

    >>> zero, mask = torch.tensor([[0.0, 0.0]]), torch.tensor([[True, True]])
    >>> gamma_weighted_surrogate(
    ...     zero - 1.5, zero, zero + 2.0, loss_mask=mask, sample_index=torch.tensor([[0, 0]])
    ... ).loss.tolist()
    [[3.0, 3.0]]
    """
    check_same_shape(policy_logprobs=policy_logprobs, log_ratio=log_ratio, advantages=advantages)
    log_weight = sample_sum(log_ratio.detach(), loss_mask, sample_index).clamp(_LOG_SMALLEST_WEIGHT, 20.0)
    power = torch.where(advantages >= 0, k_positive, k_negative).to(log_ratio.dtype)
    decay = torch.where(advantages >= 0, lambda_positive, lambda_negative).to(log_ratio.dtype)
    phi = (power * log_weight + decay * (1.0 - log_weight.exp())).exp()
    nowhere = torch.zeros_like(loss_mask)
    return TokenLoss(-phi * advantages * policy_logprobs, nowhere, nowhere)


_LOG_SMALLEST_WEIGHT = -18.420680743952367  # log 1e-8
