"""Weights and rejections for tokens whose generator is not quite the policy that is trained.

The tokens were sampled from the generator, whose log-probabilities differ from the policy's at equal weights
(two engines) and more so when they are old. All functions start from ``log_ratio = trainer - generator``
(:func:`mismatch_log_ratio`), where "trainer" is the old policy, or the policy itself when there is no old
one, and return what multiplies the loss of each token, without grad, so that they combine: a product of
weights, and of ``~is_rejected``.

Measuring the mismatch alone is in ``mismatch``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from titan_rl.functional.ratio import LOG_RATIO_BOUND
from titan_rl.functional.segments import sample_mean, sample_sum
from titan_rl.functional.shapes import check_same_shape


class Weights(NamedTuple):
    """Factors of the loss per token. 0, False and False where a token is not trained."""

    weights: torch.Tensor
    """[B, T], >= 0, no grad; 0 to reject a token."""
    is_truncated: torch.Tensor
    """[B, T] bool, True where the cap replaced the weight."""
    is_rejected: torch.Tensor
    """[B, T] bool, True where a trained token is left out."""


def mismatch_log_ratio(
    trainer_logprobs: torch.Tensor, generator_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    """``trainer - generator`` of the trained tokens, detached, bounded to ±20 nats; 0 elsewhere.

    Args:
        trainer_logprobs: ``[B, T]`` natural logarithms of the old policy (or the policy).
        generator_logprobs: ``[B, T]`` of the same tokens, as the generator reported them.
        loss_mask: ``[B, T]`` bool, True where a token is trained.

    Returns:
        ``[B, T]`` nats, no grad.

    >>> mask = torch.tensor([True, False])
    >>> mismatch_log_ratio(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, float("nan")]), mask).tolist()
    [0.5, 0.0]
    """
    check_same_shape(
        trainer_logprobs=trainer_logprobs, generator_logprobs=generator_logprobs, loss_mask=loss_mask
    )
    difference = torch.where(loss_mask, trainer_logprobs.detach() - generator_logprobs.detach(), 0.0)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def truncated_token_weights(log_ratio: torch.Tensor, loss_mask: torch.Tensor, *, cap: float) -> Weights:
    """Truncated importance sampling per token: ``min(exp(log_ratio), cap)``.

    Source: truncation of importance weights, Ionides 2008; for the generator's mismatch, Yao et al. 2025,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS), cap 2 there. verl, TRL
    ("token_truncate"), OpenRLHF and slime compute the same.

    Args:
        log_ratio: ``[B, T]`` nats, from :func:`mismatch_log_ratio`.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        cap: C, largest weight, > 0.

    Returns:
        Weights per token; nothing is rejected.

    >>> log_ratio, mask = torch.tensor([3.0, 1.0, 0.0]).log(), torch.tensor([True, True, True])
    >>> weights, is_truncated, _ = truncated_token_weights(log_ratio, mask, cap=2.0)
    >>> [round(x, 5) for x in weights.tolist()], is_truncated.tolist()
    ([2.0, 1.0, 0.0], [True, False, False])
    """
    check_same_shape(log_ratio=log_ratio, loss_mask=loss_mask)
    _check_positive(cap=cap)
    return _truncated(log_ratio, loss_mask, cap)


def truncated_sample_weights(
    log_ratio: torch.Tensor, loss_mask: torch.Tensor, *, sample_index: torch.Tensor, cap: float
) -> Weights:
    """Truncated importance sampling per sample: the product of its token ratios, at most ``cap``.

    ``min(exp(sum_t log_ratio_t), cap)``, the sum bounded to ±20 nats.

    Source: Yao et al. 2025 (TIS) at the level of sequences, as in Liu et al. 2025, "When Speed Kills
    Stability: Demystifying RL Collapse from the Training-Inference Mismatch"; verl's "sequence" level. It is
    the unbiased weight, truncated; its variance grows with the length.

    Args:
        log_ratio: ``[B, T]`` nats, from :func:`mismatch_log_ratio`.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.
        cap: C, largest weight, > 0.

    Returns:
        Weights, equal for all trained tokens of a sample; nothing is rejected.

    >>> log_ratio, mask = torch.tensor([[3.0, 0.5, 0.5]]).log(), torch.tensor([[True, True, True]])
    >>> truncated_sample_weights(
    ...     log_ratio, mask, sample_index=torch.tensor([[0, 0, 1]]), cap=2.0
    ... ).weights.tolist()
    [[1.5, 1.5, 0.5]]
    """
    check_same_shape(log_ratio=log_ratio, loss_mask=loss_mask)
    _check_positive(cap=cap)
    total = sample_sum(log_ratio.detach(), loss_mask, sample_index)
    return _truncated(total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), loss_mask, cap)


def masked_token_weights(
    log_ratio: torch.Tensor, loss_mask: torch.Tensor, *, low: float, high: float
) -> Weights:
    """The importance ratio itself where it lies in ``[low, high]``, and 0 where it does not.

    Source: Ling Team 2025 (IcePop, arXiv 2510.18855), [0.5, 5] there; verl, OpenRLHF and slime offer it. A
    token outside is too unreliable to be down-weighted, so it is left out.

    Args:
        log_ratio: ``[B, T]`` nats, from :func:`mismatch_log_ratio`.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        low: Smallest ratio kept, >= 0.
        high: Largest ratio kept, > low.

    Returns:
        Weights per token; rejected outside the bounds, nothing is truncated.

    >>> log_ratio, mask = torch.tensor([0.25, 4.0, 8.0]).log(), torch.tensor([True, True, True])
    >>> weights, _, is_rejected = masked_token_weights(log_ratio, mask, low=0.5, high=5.0)
    >>> [round(x, 5) for x in weights.tolist()], is_rejected.tolist()
    ([0.0, 4.0, 0.0], [True, False, True])
    """
    is_rejected = reject_tokens(log_ratio, loss_mask, low=low, high=high)
    weights = torch.where(loss_mask & ~is_rejected, log_ratio.detach().exp(), 0.0)
    return Weights(weights, torch.zeros_like(loss_mask), is_rejected)


def reject_tokens(
    log_ratio: torch.Tensor, loss_mask: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """Reject each token whose ratio ``exp(log_ratio)`` lies outside ``[low, high]``.

    In log space it bounds k1, the naive estimate of the divergence (verl's "token_k1").

    Source: masked importance sampling of Liu et al. 2025, "When Speed Kills Stability", per token.

    Args:
        log_ratio: ``[B, T]`` nats, from :func:`mismatch_log_ratio`.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        low: Smallest ratio kept, >= 0.
        high: Largest ratio kept, > low.

    Returns:
        ``[B, T]`` bool, True for the trained tokens to leave out.

    >>> reject_tokens(torch.tensor([0.25, 1.0]).log(), torch.tensor([True, True]), low=0.5, high=2.0).tolist()
    [True, False]
    """
    check_same_shape(log_ratio=log_ratio, loss_mask=loss_mask)
    return loss_mask & _is_outside(log_ratio.detach().exp(), low=low, high=high)


def reject_samples_by_geometric_mean(
    log_ratio: torch.Tensor, loss_mask: torch.Tensor, *, sample_index: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """Reject a whole sample when the geometric mean of its token ratios lies outside ``[low, high]``.

    ``exp(mean_t log_ratio_t)``, in log space a bound on the mean of k1 (verl's "seq_mean_k1", OpenRLHF's
    "seq-mask"). Length does not matter, so the bounds are close to 1, for example 0.99 and 1.01.

    Source: Liu et al. 2025, "When Speed Kills Stability", geometric level.

    Args:
        log_ratio: ``[B, T]`` nats, from :func:`mismatch_log_ratio`.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.
        low: Smallest geometric mean kept, >= 0.
        high: Largest geometric mean kept, > low.

    Returns:
        ``[B, T]`` bool, True for the trained tokens of the samples to leave out.

    >>> log_ratio, mask = torch.tensor([[4.0, 0.25, 4.0]]).log(), torch.tensor([[True, True, True]])
    >>> reject_samples_by_geometric_mean(
    ...     log_ratio, mask, sample_index=torch.tensor([[0, 0, 1]]), low=0.5, high=2.0
    ... ).tolist()
    [[False, False, True]]
    """
    check_same_shape(log_ratio=log_ratio, loss_mask=loss_mask)
    mean = sample_mean(log_ratio.detach(), loss_mask, sample_index).exp()
    return loss_mask & _is_outside(mean, low=low, high=high)


def reject_samples_by_mean_k3(
    log_ratio: torch.Tensor, loss_mask: torch.Tensor, *, sample_index: torch.Tensor, max_kl: float
) -> torch.Tensor:
    """Reject a whole sample when its mean estimate of ``KL(generator || trainer)`` exceeds ``max_kl``.

    ``mean_t (exp(log_ratio_t) - 1 - log_ratio_t)``: k3 of Schulman 2020, never negative, so that deviations
    of opposite signs add up instead of cancelling as they do in the geometric mean (verl's "seq_mean_k3").

    Args:
        log_ratio: ``[B, T]`` nats, from :func:`mismatch_log_ratio`.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.
        max_kl: Largest mean that is kept, nats per token, >= 0.

    Returns:
        ``[B, T]`` bool, True for the trained tokens of the samples to leave out.

    >>> log_ratio, mask = torch.tensor([[4.0, 0.25, 1.0]]).log(), torch.tensor([[True, True, True]])
    >>> index = torch.tensor([[0, 0, 1]])
    >>> reject_samples_by_mean_k3(log_ratio, mask, sample_index=index, max_kl=0.1).tolist()
    [[True, True, False]]
    """
    check_same_shape(log_ratio=log_ratio, loss_mask=loss_mask)
    log_ratio = log_ratio.detach()
    k3 = torch.expm1(log_ratio) - log_ratio
    return loss_mask & (sample_mean(k3, loss_mask, sample_index) > max_kl)


def reject_negative_samples_by_mean_k1(
    log_ratio: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    sample_index: torch.Tensor,
    advantages: torch.Tensor,
    max_kl: float,
) -> torch.Tensor:
    """Reject a whole sample when it has a negative advantage and has drifted away from the generator.

    ``A < 0`` and ``mean_t (generator_t - policy_t) > max_kl``: mistakes that the policy no longer makes teach
    it little and may destabilise it.

    Source: DeepSeek-AI 2025 (off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556), eq. 9; TRL's
    ``off_policy_mask_threshold``. The first argument is policy minus generator *now*, unlike elsewhere here.

    Args:
        log_ratio: ``[B, T]`` nats, :func:`mismatch_log_ratio` of the policy (or of policy and old policy).
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.
        advantages: ``[B, T]``, no grad.
        max_kl: Largest mean that is kept, nats per token, >= 0.

    Returns:
        ``[B, T]`` bool, True for the trained tokens to leave out.

    >>> mask, index = torch.tensor([[True, True]]), torch.tensor([[0, 1]])
    >>> reject_negative_samples_by_mean_k1(
    ...     torch.tensor([[-0.2, -0.2]]), mask, sample_index=index, advantages=torch.tensor([[1.0, -1.0]]),
    ...     max_kl=0.1,
    ... ).tolist()
    [[False, True]]
    """
    check_same_shape(log_ratio=log_ratio, loss_mask=loss_mask, advantages=advantages)
    mean = sample_mean(-log_ratio.detach(), loss_mask, sample_index)
    return loss_mask & (advantages < 0) & (mean > max_kl)


def effective_sample_fraction(mean: float, mean_of_squares: float) -> float:
    """Effective sample size of weights over the number of tokens, ``mean(w)^2 / mean(w^2)``.

    Source: Kong 1992, "A note on importance sampling using standardized weights". 1 when all weights are
    equal, 1/n when one token carries them all. It is not a mean itself: compute it from the means over all
    micro-batches and ranks.

    Args:
        mean: Of the weights of the tokens to measure.
        mean_of_squares: Of the squares of the same weights.

    Returns:
        A number in [0, 1]; 0 when there is no weight.

    >>> effective_sample_fraction(2.0, 5.0)  # weights of 1 and 3
    0.8
    """
    return mean**2 / mean_of_squares if mean_of_squares > 0 else 0.0


def _truncated(log_weight: torch.Tensor, loss_mask: torch.Tensor, cap: float) -> Weights:
    weight = log_weight.detach().exp()
    is_truncated = loss_mask & (weight > cap)
    weights = torch.where(loss_mask, weight.clamp(max=cap), 0.0)
    return Weights(weights, is_truncated, torch.zeros_like(loss_mask))


def _is_outside(ratio: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    if not 0 <= low < high:
        raise ValueError(f"low and high must satisfy 0 <= low < high; got {low} and {high}.")
    return (ratio < low) | (ratio > high)


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{name} must be above 0; got {number}.")
