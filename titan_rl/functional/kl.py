"""Per-token estimators of the KL divergence between two policies, from log-probabilities of sampled tokens.

They are written for a penalty on the distance to the reference policy, ``KL(policy || reference)`` with
tokens sampled from the policy; other pairs use them with other arguments. Aggregation over tokens is in
:mod:`titan_rl.functional.aggregate`.

All three come from Schulman (2020), "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html,
with ``r = ref_logprobs - policy_logprobs`` (the ``log r`` of that note). As *values*, k1 and k3 are unbiased
and k2 is biased, though little for close policies. As *losses* they differ, because a gradient is taken
through the estimate and not through the sampling (Tang and Munos 2025, arXiv 2506.09477):

===  ==================  ======================  =====================================================
name value               gradient of the value   its expectation under the policy is the gradient of
===  ==================  ======================  =====================================================
k1   ``-r``              ``grad log p``          nothing: it is 0. Not usable as a loss
k2   ``r^2 / 2``         ``-r grad log p``       ``KL(policy || reference)``: the right one
k3   ``exp(r) - 1 - r``  ``(1 - exp(r)) grad log p``  ``KL(reference || policy)``; equal to first order
===  ==================  ======================  =====================================================

So as a penalty in the *loss*, take k2 for the gradient of ``KL(policy || reference)`` or k3 for GRPO's. In
the *reward* the estimate is a number that the policy gradient multiplies, and no gradient goes through it:
there k1 has the right expected gradient, k2 and k3 do not. verl calls k1 "kl", k2 "mse" and k3 "low_var_kl",
which it clamps to [-10, 10]; "abs" is ``|k1|``, a distance and not an estimate of any KL (:func:`absolute`).

The right gradient needs tokens of the policy itself. For tokens of an older policy each value, k3 for
example, is to be weighted by the token's importance ratio (DeepSeek-AI 2025, arXiv 2512.02556, "Unbiased KL
Estimate").
"""

from __future__ import annotations

import torch

from titan_rl.functional.ratio import LOG_RATIO_BOUND
from titan_rl.functional.shapes import check_same_shape


def k1(policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """The naive estimator ``policy_logprobs - ref_logprobs``: unbiased, of either sign, high variance.

    Source: Schulman 2020, k1. Its gradient has expectation 0, so it measures and does not penalise.

    Args:
        policy_logprobs: Any shape, natural logarithms, of tokens sampled from the policy.
        ref_logprobs: The same shape: the same tokens under the reference.

    Returns:
        Nats, of the same shape.

    >>> k1(torch.tensor([-1.0]), torch.tensor([-1.5])).item()
    0.5
    """
    check_same_shape(policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs)
    return policy_logprobs - ref_logprobs


def k2(policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio ``(ref_logprobs - policy_logprobs)^2 / 2``: biased, never negative.

    Source: Schulman 2020, k2. As a loss on tokens of the policy it has the gradient of
    ``KL(policy || reference)``.

    Args:
        policy_logprobs: Any shape, natural logarithms, of tokens sampled from the policy.
        ref_logprobs: The same shape: the same tokens under the reference.

    Returns:
        Nats, of the same shape.

    >>> k2(torch.tensor([-1.0]), torch.tensor([-1.5])).item()
    0.125
    """
    check_same_shape(policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs)
    return 0.5 * (ref_logprobs - policy_logprobs).square()


def k3(policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """``exp(r) - 1 - r`` with ``r = ref_logprobs - policy_logprobs``: unbiased and never negative.

    Source: Schulman 2020, k3; the penalty of GRPO (Shao et al. 2024, arXiv 2402.03300, eq. 4). As a loss on
    tokens of the policy it has the gradient of ``KL(reference || policy)``, which equals that of
    ``KL(policy || reference)`` to first order in the distance.

    We bound ``r`` above by :data:`~titan_rl.functional.ratio.LOG_RATIO_BOUND`, beyond which value and
    gradient stay finite, the gradient being 0. verl also clamps the value to [-10, 10]; we do not.

    Args:
        policy_logprobs: Any shape, natural logarithms, of tokens sampled from the policy.
        ref_logprobs: The same shape: the same tokens under the reference.

    Returns:
        Nats, of the same shape.

    >>> round(k3(torch.tensor([-1.0]), torch.tensor([-1.5])).item(), 6)
    0.106531
    """
    check_same_shape(policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs)
    log_ratio = (ref_logprobs - policy_logprobs).clamp(max=LOG_RATIO_BOUND)
    return torch.expm1(log_ratio) - log_ratio


def absolute(policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """The absolute log-ratio ``|policy_logprobs - ref_logprobs|``: how far apart, whatever the direction.

    No estimate of a KL divergence, but what verl offers as "abs". As a loss its gradient is of constant size
    per token, however far apart the two are.

    Args:
        policy_logprobs: Any shape, natural logarithms, of tokens sampled from the policy.
        ref_logprobs: The same shape: the same tokens under the reference.

    Returns:
        Nats, of the same shape.

    >>> absolute(torch.tensor([-2.0]), torch.tensor([-1.5])).item()
    0.5
    """
    return k1(policy_logprobs, ref_logprobs).abs()
