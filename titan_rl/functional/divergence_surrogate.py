"""Policy losses that bound a divergence of the policy from the old policy, not the range of the ratio."""

from __future__ import annotations

from typing import Literal

import torch

from titan_rl.functional.ratio import LOG_RATIO_BOUND
from titan_rl.functional.shapes import check_same_shape
from titan_rl.functional.surrogate import TokenLoss


def total_variation_masked(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    max_decrease: float,
    max_increase: float,
    max_weight: float = 20.0,
    objective: Literal["log_probability", "ratio"] = "log_probability",
) -> TokenLoss:
    r"""``-sg[min(r, max_weight)] A log p``, dropped where the token's probability has already moved too far.

    Dropped where ``A > 0`` and ``p - p_old > max_increase``, or ``A <= 0`` and ``p - p_old < -max_decrease``:
    ``|p - p_old|`` is the total variation between the two-outcome distributions "this token or another". The
    ratio of a rare token may be large while its probability hardly moves, and the reverse.

    Source: Qi et al. 2026 (DPPO, arXiv 2602.04879), eq. 12 with the binary total variation of eq. 13. One
    bound there is two here, as in verl. The weight there is ``r`` itself: section 5.4 finds that truncating
    it harms, which is why verl's cap, the default here, is as high as 20. prime-rl has the objective "ratio"
    and no cap.

    Args:
        policy_logprobs: Any shape, natural logarithms, with grad.
        old_logprobs: The same shape, no grad.
        advantages: The same shape, no grad.
        max_decrease: Largest decrease of a probability that is still pushed further, in [0, 1].
        max_increase: Largest increase of a probability that is still pushed further, in [0, 1].
        max_weight: Cap of the importance weight, > 0; infinity for none.
        objective: What stands behind the weight: ``log p`` or ``p / sg[p]``. Same gradient, other value.

    Returns:
        The loss of each token, with grad; where it was dropped below, and above.

    >>> loss, low, high = total_variation_masked(
    ...     torch.tensor([0.5, 0.9]).log(), torch.tensor([0.25, 0.6]).log(), torch.tensor([1.0, 1.0]),
    ...     max_decrease=0.28, max_increase=0.28,
    ... )
    >>> high.tolist(), loss[1].item()
    ([False, True], 0.0)
    """
    check_same_shape(policy_logprobs=policy_logprobs, old_logprobs=old_logprobs, advantages=advantages)
    policy = policy_logprobs.detach()
    moved = policy.exp() - old_logprobs.exp()
    is_low = (advantages <= 0) & (moved < -max_decrease)
    is_high = (advantages > 0) & (moved > max_increase)
    return _weighted(
        policy_logprobs,
        old_logprobs,
        advantages,
        max_weight=max_weight,
        is_dropped=(is_low, is_high),
        objective=objective,
    )


def binary_kl_masked(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    max_kl_decrease: float,
    max_kl_increase: float,
    max_weight: float = 20.0,
    objective: Literal["log_probability", "ratio"] = "log_probability",
) -> TokenLoss:
    r""":func:`total_variation_masked` with the KL divergence of the two-outcome distributions as the measure.

    ``p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))``; a token is dropped where it exceeds the
    bound *and* the update would push it further in the direction in which it has moved.

    Source: Qi et al. 2026 (DPPO, arXiv 2602.04879), eq. 12 with the binary KL of eq. 14. 1e-8 is added to
    both complements, as in verl.

    Args:
        policy_logprobs: Any shape, natural logarithms, with grad.
        old_logprobs: The same shape, no grad.
        advantages: The same shape, no grad.
        max_kl_decrease: Bound where the advantage is not positive and the probability fell, nats, >= 0.
        max_kl_increase: Bound where the advantage is positive and the probability rose, nats, >= 0.
        max_weight: Cap of the importance weight, > 0; infinity for none.
        objective: What stands behind the weight: ``log p`` or ``p / sg[p]``. Same gradient, other value.

    Returns:
        The loss of each token, with grad; where it was dropped below, and above.

    >>> loss, low, high = binary_kl_masked(
    ...     torch.tensor([0.1, 0.1]).log(), torch.tensor([0.9, 0.9]).log(), torch.tensor([-1.0, 1.0]),
    ...     max_kl_decrease=0.2, max_kl_increase=0.2,
    ... )
    >>> low.tolist(), high.tolist()  # fallen far: pushed back up, but no further down
    ([True, False], [False, False])
    """
    check_same_shape(policy_logprobs=policy_logprobs, old_logprobs=old_logprobs, advantages=advantages)
    policy = policy_logprobs.detach()
    p, p_old = policy.exp(), old_logprobs.exp()
    complements = ((1.0 - p_old + 1e-8) / (1.0 - p + 1e-8)).log()
    kl = p_old * (old_logprobs - policy) + (1.0 - p_old) * complements
    is_low = (advantages <= 0) & (p < p_old) & (kl > max_kl_decrease)
    is_high = (advantages > 0) & (p > p_old) & (kl > max_kl_increase)
    return _weighted(
        policy_logprobs,
        old_logprobs,
        advantages,
        max_weight=max_weight,
        is_dropped=(is_low, is_high),
        objective=objective,
    )


def quadratic_surrogate(
    policy_logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, *, beta: float
) -> TokenLoss:
    r"""``-A log p + beta/2 (log p - log p_old)^2``: a pull towards the old policy in place of a clip.

    Its minimum over ``log p`` is at a log-ratio of ``A / beta``.

    Source: Richemond et al. 2024 (DRO, arXiv 2405.19107), eq. 4 divided by its temperature, which is beta
    here (the authors rescale its gradient, eq. 8, the same way), without the terms that do not depend on the
    policy. The advantage stands for "reward minus value", the old policy for the reference and a token for
    the sequence, as in verl, whose default for beta is 0.5.

    Args:
        policy_logprobs: Any shape, natural logarithms, with grad.
        old_logprobs: The same shape, no grad.
        advantages: The same shape, no grad.
        beta: Strength of the pull, >= 0.

    Returns:
        The loss of each token, with grad; the flags are False everywhere.

    >>> policy, old = torch.tensor([-1.0]), torch.tensor([-2.0])
    >>> quadratic_surrogate(policy, old, torch.tensor([1.0]), beta=0.5).loss.item()
    1.25
    """
    check_same_shape(policy_logprobs=policy_logprobs, old_logprobs=old_logprobs, advantages=advantages)
    penalty = 0.5 * beta * (policy_logprobs - old_logprobs).square()
    nowhere = torch.zeros_like(advantages, dtype=torch.bool)
    return TokenLoss(penalty - advantages * policy_logprobs, nowhere, nowhere)


def _weighted(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    max_weight: float,
    is_dropped: tuple[torch.Tensor, torch.Tensor],
    objective: str,
) -> TokenLoss:
    is_low, is_high = is_dropped
    log_weight = (policy_logprobs.detach() - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weight = torch.where(is_low | is_high, 0.0, log_weight.exp().clamp(max=max_weight))
    target = policy_logprobs
    if objective == "ratio":
        target = (policy_logprobs - policy_logprobs.detach()).exp()
    elif objective != "log_probability":
        raise ValueError(f"objective must be 'log_probability' or 'ratio'; got {objective!r}.")
    return TokenLoss(-weight * advantages * target, is_low, is_high)
