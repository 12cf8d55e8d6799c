"""Per-token policy losses from a ratio and an advantage. Sums over tokens are in ``aggregate``.

Here are those in which a token depends on itself alone: hard clips, soft gates, weighted log-probabilities.
Those that look at a whole sample are in ``sample_surrogate``, those bounded by a divergence in
``divergence_surrogate``. Every one of them minimises: ``-A`` times something that grows with the policy's
probability of the token. At ``policy = old`` all of them have the gradient ``-A grad log p``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from titan_rl.functional.shapes import check_same_shape


class TokenLoss(NamedTuple):
    """A policy loss per token, and where a bound was at work."""

    loss: torch.Tensor
    """Of the shape of the arguments, with grad."""
    is_clipped_low: torch.Tensor
    """bool, True where the lower bound replaced the ratio."""
    is_clipped_high: torch.Tensor
    """bool, True where the upper bound did."""


class DualClippedLoss(NamedTuple):
    """A :class:`TokenLoss` with a third bound."""

    loss: torch.Tensor
    """Of the shape of the arguments, with grad."""
    is_clipped_low: torch.Tensor
    """bool, True where the lower bound took the gradient away (A < 0)."""
    is_clipped_high: torch.Tensor
    """bool, True where the upper bound did (A > 0)."""
    is_dual_clipped: torch.Tensor
    """bool, True where the dual bound did (A < 0)."""


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """The loss ``-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)`` of PPO, a value per token.

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7, negated because we minimise. Two bounds instead of
    one are "clip-higher" of Yu et al. 2025 (DAPO, arXiv 2503.14476, section 3.1). The third, dual bound,
    which verl applies by default, is :func:`dual_clipped_surrogate`.

    A token is clipped where the minimum takes the clipped branch and that is smaller: ``A > 0`` and
    ``ratio > 1 + clip_high``, or ``A < 0`` and ``ratio < 1 - clip_low``. Its gradient is exactly 0.

    Args:
        ratio: Any shape, policy against old policy, with grad.
        advantages: The same shape, no grad.
        clip_low: How far below 1 the ratio may go, in [0, 1].
        clip_high: How far above 1 the ratio may go, >= 0.

    Returns:
        The loss of each token, with grad; True where it is clipped at the lower bound; True where at the
        upper bound.

    >>> loss, low, high = clipped_surrogate(
    ...     torch.tensor([1.5, 0.5, 1.5]), torch.tensor([1.0, -1.0, -1.0]), clip_low=0.2, clip_high=0.25
    ... )
    >>> [round(x, 3) for x in loss.tolist()], low.tolist(), high.tolist()
    ([-1.25, 0.8, 1.5], [False, True, False], [True, False, False])
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    is_clipped_low = (advantages < 0) & (ratio < 1.0 - clip_low)
    is_clipped_high = (advantages > 0) & (ratio > 1.0 + clip_high)
    clipped = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.where(is_clipped_low | is_clipped_high, clipped, ratio) * advantages
    return TokenLoss(loss, is_clipped_low, is_clipped_high)


def dual_clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float, clip_dual: float
) -> DualClippedLoss:
    """:func:`clipped_surrogate`, whose loss is bounded by ``-clip_dual A`` where ``A < 0``.

    The plain clip leaves the loss unbounded where the advantage is negative and the ratio large. There the
    objective becomes ``max(min(ratio A, clip(ratio) A), clip_dual A)``: constant, without gradient, for
    ``ratio > clip_dual``.

    Source: Ye et al. 2020 (arXiv 1912.09729), eq. 5 ("dual-clip PPO"), c = 3 there and in verl, which has it
    on by default; OpenRLHF and slime have it as an option.

    Args:
        ratio: Any shape, policy against old policy, with grad.
        advantages: The same shape, no grad.
        clip_low: How far below 1 the ratio may go, in [0, 1].
        clip_high: How far above 1 the ratio may go, >= 0.
        clip_dual: c, the largest ratio that a token with a negative advantage is pushed down from, > 1.

    Returns:
        The loss of each token, with grad, and where each of the three bounds took the gradient away.

    Raises:
        ValueError: When ``clip_dual`` is not above 1.

    >>> loss, low, high, dual = dual_clipped_surrogate(
    ...     torch.tensor([5.0, 2.0]), torch.tensor([-1.0, -1.0]), clip_low=0.2, clip_high=0.2, clip_dual=3.0
    ... )
    >>> loss.tolist(), dual.tolist()
    ([3.0, 2.0], [True, False])
    """
    if not clip_dual > 1:
        raise ValueError(f"clip_dual must be above 1; got {clip_dual}.")
    loss, is_clipped_low, is_clipped_high = clipped_surrogate(
        ratio, advantages, clip_low=clip_low, clip_high=clip_high
    )
    is_dual_clipped = (advantages < 0) & (ratio > clip_dual)
    loss = torch.where(is_dual_clipped, -clip_dual * advantages, loss)
    return DualClippedLoss(loss, is_clipped_low, is_clipped_high, is_dual_clipped)


def reinforce_surrogate(policy_logprobs: torch.Tensor, advantages: torch.Tensor) -> TokenLoss:
    """The loss ``-A log p`` of the score-function estimator: no ratio, no bound.

    Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement
    learning"; as a loss on its own, Chu et al. 2025 (GPG, arXiv 2504.02546). Right only for tokens sampled
    from the policy itself.

    Args:
        policy_logprobs: Any shape, natural logarithms, with grad.
        advantages: The same shape, no grad.

    Returns:
        The loss of each token, with grad; the flags are False everywhere.

    >>> reinforce_surrogate(torch.tensor([-2.0]), torch.tensor([0.5])).loss.item()
    1.0
    """
    check_same_shape(policy_logprobs=policy_logprobs, advantages=advantages)
    nowhere = torch.zeros_like(advantages, dtype=torch.bool)
    return TokenLoss(-policy_logprobs * advantages, nowhere, nowhere)


def clipped_weight_surrogate(
    policy_logprobs: torch.Tensor,
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float,
) -> TokenLoss:
    """The loss ``-sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log p``: a bounded weight.

    The ratio is an importance weight here and not what is optimised, so a bound on it limits a token's
    gradient without removing it.

    Source: MiniMax 2025 (CISPO, MiniMax-M1, arXiv 2506.13585), eq. 4 and 5. They tune the upper bound only:
    ``clip_low`` of 1, the default, is no lower bound. Bounds are *relative to 1*, as in the paper and in verl
    and slime; TRL's ``epsilon_high`` is the absolute bound, ``1 + clip_high``, and it has no lower one.

    Args:
        policy_logprobs: Any shape, natural logarithms, with grad.
        ratio: The same shape, policy against old policy; its gradient is not used.
        advantages: The same shape, no grad.
        clip_low: How far below 1 the weight may go, in [0, 1].
        clip_high: How far above 1 the weight may go, >= 0.

    Returns:
        The loss of each token, with grad, and where the weight is bounded below and above, whatever the sign
        of the advantage. These tokens do learn.

    >>> loss, low, high = clipped_weight_surrogate(
    ...     torch.tensor([-1.0, -1.0]), torch.tensor([4.0, 0.5]), torch.tensor([1.0, 1.0]), clip_high=1.0
    ... )
    >>> loss.tolist(), low.tolist(), high.tolist()
    ([2.0, 0.5], [False, False], [True, False])
    """
    check_same_shape(policy_logprobs=policy_logprobs, ratio=ratio, advantages=advantages)
    ratio = ratio.detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -weight * advantages * policy_logprobs
    return TokenLoss(loss, ratio < 1.0 - clip_low, ratio > 1.0 + clip_high)


def soft_gated_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> TokenLoss:
    r"""A smooth gate in place of the clip.

    .. math:: -A f(r), \quad f(r) = \frac{4}{\tau} \sigma(\tau (r - 1)), \quad
       f'(r) = 4 \sigma(\tau (r - 1)) (1 - \sigma(\tau (r - 1)))

    with ``tau_positive`` where ``A > 0`` and ``tau_negative`` elsewhere. The gradient is that of the plain
    ratio at r = 1 (f' = 1) and fades on both sides, the faster the larger tau. The value at r = 1 is
    ``-2 A / tau``, so losses of different taus are not comparable.

    Source: Gao et al. 2025 (SAPO, arXiv 2511.20347), eq. 5 and 6; the defaults are theirs, TRL's and verl's.

    Args:
        ratio: Any shape, policy against old policy, with grad.
        advantages: The same shape, no grad.
        tau_positive: Temperature where the advantage is positive, > 0.
        tau_negative: Temperature where it is not, > 0.

    Returns:
        The loss of each token, with grad; the flags are False everywhere, since nothing is cut off.

    Raises:
        ValueError: When a temperature is not above 0.

    >>> ratio, advantages = torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0])
    >>> soft_gated_surrogate(ratio, advantages, tau_negative=2.0).loss.tolist()
    [-2.0, 1.0]
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    if not (tau_positive > 0 and tau_negative > 0):
        raise ValueError(
            f"tau_positive and tau_negative must be above 0; got {tau_positive}, {tau_negative}."
        )
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    nowhere = torch.zeros_like(advantages, dtype=torch.bool)
    return TokenLoss(-gate * advantages, nowhere, nowhere)
