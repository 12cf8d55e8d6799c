"""Importance ratios between the policy and the old policy. Clipping them is in ``surrogate``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from titan_rl.functional.segments import sample_mean, sample_sum
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
    return _bounded(policy_logprobs - old_logprobs)


def sequence_ratio(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    *,
    loss_mask: torch.Tensor,
    sample_index: torch.Tensor,
    length_normalise: bool = True,
) -> Ratio:
    r"""One ratio per sample, the same at each of its tokens.

    .. math:: s_i = \exp\Big(\frac{1}{|y_i|} \sum_t \log \frac{\pi(y_t)}{\pi_{old}(y_t)}\Big)

    the geometric mean of the token ratios over the trained tokens, or their product without
    ``length_normalise``. The gradient of ``s_i`` reaches every trained token of the sample.

    Source: Zheng et al. 2025 (GSPO, arXiv 2507.18071), eq. 7; the product is the plain importance weight of a
    sequence, eq. 7 without its exponent. verl bounds the logarithm above by 10, TRL and OpenRLHF not at all,
    we at ±20.

    Args:
        policy_logprobs: ``[B, T]`` natural logarithms, with grad.
        old_logprobs: ``[B, T]``, no grad.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.
        length_normalise: Divide the log-ratio of the sequence by its number of trained tokens.

    Returns:
        ``[B, T]`` each; ratio 1 in the padding and for a sample without a trained token.

    >>> policy, old = torch.tensor([[-1.0, -1.0, -3.0]]), torch.tensor([[-1.0, -2.0, -3.5]])
    >>> mask, index = torch.tensor([[True, True, True]]), torch.tensor([[0, 0, 1]])
    >>> sequence_ratio(policy, old, loss_mask=mask, sample_index=index).log_ratio.tolist()
    [[0.5, 0.5, 0.5]]
    """
    check_same_shape(policy_logprobs=policy_logprobs, old_logprobs=old_logprobs, loss_mask=loss_mask)
    reduce = sample_mean if length_normalise else sample_sum
    return _bounded(reduce(policy_logprobs - old_logprobs, loss_mask, sample_index))


def sequence_token_ratio(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    *,
    loss_mask: torch.Tensor,
    sample_index: torch.Tensor,
    length_normalise: bool = True,
) -> Ratio:
    r"""The value of :func:`sequence_ratio`, with the gradient of each token's own probability.

    .. math:: s_{i,t} = \mathrm{sg}[s_i] \cdot \frac{\pi(y_t)}{\mathrm{sg}[\pi(y_t)]}

    so that advantages may differ within a sample. With one advantage per sample and a mean over its tokens,
    loss and gradient equal those of :func:`sequence_ratio`.

    Source: Zheng et al. 2025 (GSPO-token, arXiv 2507.18071, eq. 14); the form that verl computes.

    Args:
        policy_logprobs: ``[B, T]`` natural logarithms, with grad.
        old_logprobs: ``[B, T]``, no grad.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.
        length_normalise: Divide the log-ratio of the sequence by its number of trained tokens.

    Returns:
        ``[B, T]`` each; ratio 1 and no gradient where a token is not trained.

    >>> policy = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    >>> mask, index = torch.tensor([[True, True]]), torch.tensor([[0, 0]])
    >>> old = torch.tensor([[-1.0, -2.0]])
    >>> ratio = sequence_token_ratio(policy, old, loss_mask=mask, sample_index=index).ratio
    >>> torch.autograd.grad(ratio[0, 0], policy)[0].tolist()
    [[1.6487212181091309, 0.0]]
    """
    whole = sequence_ratio(
        policy_logprobs.detach(),
        old_logprobs,
        loss_mask=loss_mask,
        sample_index=sample_index,
        length_normalise=length_normalise,
    )
    own = torch.where(loss_mask & ~whole.is_clamped, policy_logprobs, 0.0)
    log_ratio = torch.where(loss_mask, whole.log_ratio, 0.0) + (own - own.detach())
    return Ratio(log_ratio.exp(), log_ratio, whole.is_clamped & loss_mask)


def _bounded(difference: torch.Tensor) -> Ratio:
    log_ratio = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return Ratio(log_ratio.exp(), log_ratio, difference.detach().abs() > LOG_RATIO_BOUND)
