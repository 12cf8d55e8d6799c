r"""Returns and advantages per token, backwards over the trained tokens of each sample of packed rows.

Tokens that are not trained (prompts, what an environment said between turns, padding) are no time steps: they
are skipped, whatever stands there, and get 0. After a sample's last trained token there is nothing: its value
is 0. Rewards and values carry no grad from here.

All three are linear recurrences :math:`x_t = a_t x_{t+1} + b_t`, solved in :math:`\log_2 T` steps on whole
``[B, T]`` tensors rather than in T, and in float64: the discounts of a long sample are high powers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from titan_rl.functional.segments import row_segments, sample_count
from titan_rl.functional.shapes import check_same_shape


class Gae(NamedTuple):
    """Generalised advantage estimates and what the critic is trained towards; both without grad."""

    advantages: torch.Tensor
    """[B, T], 0 where a token is not trained."""
    returns: torch.Tensor
    """[B, T], 0 where a token is not trained."""


def discounted_returns(
    rewards: torch.Tensor, loss_mask: torch.Tensor, *, sample_index: torch.Tensor, gamma: float = 1.0
) -> torch.Tensor:
    r"""Discounted sum of the rewards from each trained token to the end of its sample.

    .. math:: G_t = r_t + \gamma G_{t+1}

    over the trained tokens. Source: the return-to-go of Sutton and Barto 2018, eq. 3.9; the advantage of
    REINFORCE++ before whitening (Hu et al. 2025, arXiv 2501.03262, eq. 4 of version 9).

    Args:
        rewards: ``[B, T]``, usually 0 but at a sample's last trained token. Not looked at outside
            ``loss_mask``.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.
        gamma: Discount per trained token, in [0, 1].

    Returns:
        ``[B, T]``, no grad, 0 where a token is not trained.

    >>> mask = torch.tensor([[True, False, True, True]])
    >>> discounted_returns(
    ...     torch.tensor([[0.0, 9.0, 4.0, 2.0]]), mask, sample_index=torch.tensor([[0, 0, 0, 1]]), gamma=0.5
    ... ).tolist()
    [[2.0, 0.0, 4.0, 2.0]]
    """
    check_same_shape(rewards=rewards, loss_mask=loss_mask, sample_index=sample_index)
    selected = torch.where(loss_mask, rewards.detach(), 0.0)
    factors = torch.full_like(selected, gamma, dtype=torch.float64)
    found = _backwards(factors, selected.double(), loss_mask, sample_index)
    return torch.where(loss_mask, found, 0.0).to(rewards.dtype)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    *,
    loss_mask: torch.Tensor,
    sample_index: torch.Tensor,
    gamma: float = 1.0,
    lambda_policy: float | torch.Tensor = 0.95,
    lambda_critic: float | torch.Tensor | None = None,
) -> Gae:
    r"""Generalised advantage estimation, with a lambda of its own for the critic's targets.

    .. math:: \delta_t = r_t + \gamma V_{t+1} - V_t, \quad A_t = \delta_t + \gamma \lambda A_{t+1}, \quad
       R_t = V_t + A_t|_{\lambda = \lambda_{critic}}

    over the trained tokens, with V = A = 0 after a sample's last one.

    Source: Schulman et al. 2015 (arXiv 1506.02438), eq. 11 and 16. The two lambdas are the decoupled GAE of
    Yuan et al. 2025 (VC-PPO, arXiv 2503.01491); with ``lambda_critic = 1`` the targets are Monte-Carlo
    returns. verl whitens inside its function and OpenRLHF outside; here it is the caller's choice
    (:mod:`titan_rl.functional.whitening`).

    Args:
        rewards: ``[B, T]``. Not looked at outside ``loss_mask``.
        values: ``[B, T]`` the critic's value of the state in which the token was sampled, i.e. before it.
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.
        gamma: Discount per trained token, in [0, 1].
        lambda_policy: For the advantages: a number in [0, 1] or ``[B, T]``, as
            :func:`length_adaptive_lambda`.
        lambda_critic: For the returns, likewise; None for that of the policy.

    Returns:
        Advantages, not whitened, and returns.

    >>> mask, index = torch.tensor([[True, True]]), torch.tensor([[0, 0]])
    >>> rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    >>> lambdas = {"lambda_policy": 0.0, "lambda_critic": 1.0}
    >>> estimate = gae(rewards, values, loss_mask=mask, sample_index=index, **lambdas)
    >>> estimate.advantages.tolist(), estimate.returns.tolist()
    ([[-0.25, 0.75]], [[1.0, 1.0]])
    """
    check_same_shape(rewards=rewards, values=values, loss_mask=loss_mask, sample_index=sample_index)
    dtype = values.dtype
    rewards = torch.where(loss_mask, rewards.detach(), 0.0).double()
    values = torch.where(loss_mask, values.detach(), 0.0).double()
    # x_t = V_t at a trained token and x_{t+1} elsewhere: the value of the next trained token is x_{t+1}.
    upcoming = _backwards(torch.zeros_like(values), values, loss_mask, sample_index)
    next_values = _shifted(upcoming, sample_index)
    deltas = torch.where(loss_mask, rewards + gamma * next_values - values, 0.0)

    def discounted(decay: float | torch.Tensor) -> torch.Tensor:
        factors = gamma * torch.as_tensor(decay, dtype=values.dtype, device=values.device)
        found = _backwards(factors.expand_as(values), deltas, loss_mask, sample_index)
        return torch.where(loss_mask, found, 0.0)

    advantages = discounted(lambda_policy)
    from_critic = advantages if lambda_critic is None else discounted(lambda_critic)
    return Gae(advantages.to(dtype), (values + from_critic).to(dtype))


def length_adaptive_lambda(
    loss_mask: torch.Tensor, sample_index: torch.Tensor, *, alpha: float = 0.05
) -> torch.Tensor:
    """A lambda per sample, ``1 - 1 / (alpha l)`` for l trained tokens, never below 0.

    The weights ``lambda^k`` of the temporal differences then sum to about ``alpha l``, so that a long
    sample's reward is not forgotten after a fixed number of tokens.

    Source: Yue et al. 2025 (VAPO, arXiv 2504.05118), section 4.2, alpha 0.05 there. The paper leaves open
    what happens below ``1 / alpha`` tokens, where the formula is negative; here that is 0.

    Args:
        loss_mask: ``[B, T]`` bool, True where a token is trained.
        sample_index: ``[B, T]`` int64, constant on a sample, -1 in the padding.
        alpha: Share of a sample's tokens that its temporal differences reach over, > 0.

    Returns:
        ``[B, T]`` fp32 in [0, 1), constant on a sample.

    >>> mask, index = torch.tensor([[True, True, True, True, True]]), torch.tensor([[0, 0, 0, 0, 1]])
    >>> length_adaptive_lambda(mask, index, alpha=0.5).tolist()
    [[0.5, 0.5, 0.5, 0.5, 0.0]]
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0; got {alpha}.")
    lengths = sample_count(loss_mask, sample_index).clamp(min=1)
    return (1.0 - 1.0 / (alpha * lengths)).clamp(min=0.0)


def _backwards(
    factors: torch.Tensor, terms: torch.Tensor, loss_mask: torch.Tensor, sample_index: torch.Tensor
) -> torch.Tensor:
    """Solve ``x_t = factors_t x_{t+1} + terms_t``; untrained tokens pass ``x_{t+1}`` on; samples are apart.

    Pairs (factor, term) compose associatively, so after the step with shift d each pair covers 2d tokens.
    """
    segments = row_segments(sample_index)
    is_last = torch.ones_like(loss_mask)
    is_last[:, :-1] = segments[:, 1:] != segments[:, :-1]
    factors = torch.where(loss_mask, factors, 1.0).masked_fill(is_last, 0.0)
    length, shift = terms.shape[1], 1
    while shift < length:
        later = torch.nn.functional.pad(terms[:, shift:], (0, shift))
        # Where the factor is 0, nothing of what comes later counts: infinity, times 0, would be NaN instead.
        terms = terms + torch.where(factors == 0, 0.0, factors * later)
        # Beyond the end of the row there is nothing: the factor of nothing is 0.
        factors = factors * torch.nn.functional.pad(factors[:, shift:], (0, shift))
        shift *= 2
    return terms


def _shifted(values: torch.Tensor, sample_index: torch.Tensor) -> torch.Tensor:
    """``values_{t+1}`` of the same sample, or 0."""
    segments = row_segments(sample_index)
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    is_same = torch.nn.functional.pad(segments[:, 1:] == segments[:, :-1], (0, 1))
    return torch.where(is_same, following, 0.0)
