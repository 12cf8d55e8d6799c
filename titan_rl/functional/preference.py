"""Losses on preferences, a value per pair or per completion. Sums over a step are their caller's business.

Policies are seen through sequence log-probabilities: the sum over a completion's trained tokens. A reward
model is seen through one reward per completion. ``log sigmoid`` and ``softplus`` are the stable ones.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from titan_rl.functional.shapes import check_same_shape


def bradley_terry_loss(
    chosen_rewards: torch.Tensor,
    rejected_rewards: torch.Tensor,
    *,
    margins: torch.Tensor | None = None,
    centring: float = 0.0,
) -> torch.Tensor:
    r"""Negative log-likelihood that the chosen completion wins, for a reward model.

    .. math:: -\log\sigma(r_c - r_r - m) + \eta\,(r_c + r_r)^2

    Source: Ouyang et al. 2022 (InstructGPT, arXiv 2203.02155), eq. 1, for one pair a prompt; the margin m is
    that of Touvron et al. 2023 (Llama 2, arXiv 2307.09288), eq. 2; the centring term is the regulariser of
    Eisenstein et al. 2023 (arXiv 2312.09244), eq. 2, TRL's ``center_rewards_coefficient``: the likelihood
    does not change when a constant is added to all rewards, this term fixes the constant.

    Args:
        chosen_rewards: ``[P]``, with grad.
        rejected_rewards: ``[P]``, with grad.
        margins: ``[P]``, by how much the chosen one should win, in units of reward; None for 0.
        centring: eta, >= 0.

    Returns:
        ``[P]`` nats, with grad.

    >>> [round(x, 4) for x in bradley_terry_loss(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0])).tolist()]
    [0.6931, 2.1269]
    """
    check_same_shape(chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards)
    difference = chosen_rewards - rejected_rewards
    if margins is not None:
        check_same_shape(chosen_rewards=chosen_rewards, margins=margins)
        difference = difference - margins
    loss = -logsigmoid(difference)
    return loss + centring * (chosen_rewards + rejected_rewards).square() if centring else loss


def log_ratio(
    policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    r"""How much likelier a completion is under the policy than under the reference, in nats.

    .. math:: \log\pi(y|x) - \log\pi_{ref}(y|x), \quad\text{divided by } |y| \text{ if lengths are given}

    Times beta it is the implicit reward of Rafailov et al. 2023 (DPO, arXiv 2305.18290), eq. 5 without the
    term that depends on the prompt alone. Divided by the length it is that of length-normalised DPO: Lambert
    et al. 2024 (Tulu 3, arXiv 2411.15124), eq. 6, and Meng et al. 2024 (SimPO, arXiv 2405.14734).

    Args:
        policy_logprobs: ``[N]``, sums over trained tokens, with grad.
        ref_logprobs: ``[N]``, the same under the reference, no grad.
        lengths: ``[N]`` trained tokens, at least 1; None for the plain sum.

    Returns:
        ``[N]`` nats, or nats per token, with grad.
    """
    check_same_shape(policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs)
    difference = policy_logprobs - ref_logprobs
    return difference if lengths is None else per_token(difference, lengths)


def per_token(logprobs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Mean over a completion's trained tokens: ``logprobs / lengths``.

    Args:
        logprobs: ``[N]`` sums, with grad.
        lengths: ``[N]`` trained tokens, at least 1.
    """
    check_same_shape(logprobs=logprobs, lengths=lengths)
    return logprobs / lengths


def dpo_loss(
    chosen_log_ratios: torch.Tensor,
    rejected_log_ratios: torch.Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    r"""Direct preference optimisation, and its conservative form with smoothed labels.

    .. math:: -(1-\epsilon)\log\sigma(\beta h) - \epsilon\log\sigma(-\beta h), \qquad h = l_c - l_r

    Source: Rafailov et al. 2023 (arXiv 2305.18290), eq. 7. With epsilon > 0: Mitchell 2023 ("A note on DPO
    with noisy preferences & relationship to IPO"), eq. 3, cDPO: a label is wrong with probability epsilon.

    Args:
        chosen_log_ratios: ``[P]`` from :func:`log_ratio`, with grad.
        rejected_log_ratios: ``[P]``, with grad.
        beta: Strength of the tie to the reference, > 0, in units of reward per nat.
        label_smoothing: epsilon, in [0, 0.5).

    Returns:
        ``[P]`` nats, with grad.

    >>> round(dpo_loss(torch.tensor([0.5]), torch.tensor([-0.2]), beta=0.1).item(), 5)
    0.65876
    """
    check_same_shape(chosen_log_ratios=chosen_log_ratios, rejected_log_ratios=rejected_log_ratios)
    logits = beta * (chosen_log_ratios - rejected_log_ratios)
    if not label_smoothing:
        return -logsigmoid(logits)
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def ipo_loss(
    chosen_log_ratios: torch.Tensor, rejected_log_ratios: torch.Tensor, *, beta: float
) -> torch.Tensor:
    r"""Identity preference optimisation: a squared distance to a fixed margin, which cannot run away.

    .. math:: \Big(h - \frac{1}{2\beta}\Big)^2, \qquad h = l_c - l_r

    Source: Azar et al. 2023 (arXiv 2310.12036), eq. 17, whose tau is beta. The paper's h is made of *sums*
    over tokens, as in OpenRLHF; TRL and AReaL divide each log-ratio by its completion's length, which is this
    function on length-normalised log-ratios.

    Args:
        chosen_log_ratios: ``[P]`` from :func:`log_ratio`, with grad.
        rejected_log_ratios: ``[P]``, with grad.
        beta: > 0; the margin is ``1 / (2 beta)`` nats (nats per token when normalised).

    Returns:
        ``[P]`` nats squared, with grad.

    >>> ipo_loss(torch.tensor([0.5]), torch.tensor([-0.5]), beta=0.25).tolist()
    [1.0]
    """
    check_same_shape(chosen_log_ratios=chosen_log_ratios, rejected_log_ratios=rejected_log_ratios)
    return (chosen_log_ratios - rejected_log_ratios - 1 / (2 * beta)).square()


def simpo_loss(
    chosen_logprobs: torch.Tensor,
    rejected_logprobs: torch.Tensor,
    chosen_lengths: torch.Tensor,
    rejected_lengths: torch.Tensor,
    *,
    beta: float,
    gamma: float,
) -> torch.Tensor:
    r"""Simple preference optimisation: the mean log-probability of a token is the reward; no reference.

    .. math:: -\log\sigma\Big(\beta\,\frac{\log\pi(y_c|x)}{|y_c|} - \beta\,\frac{\log\pi(y_r|x)}{|y_r|} -
        \gamma\Big)

    Source: Meng et al. 2024 (arXiv 2405.14734), eq. 6.

    Args:
        chosen_logprobs: ``[P]`` sums over trained tokens, with grad.
        rejected_logprobs: ``[P]``, with grad.
        chosen_lengths: ``[P]`` trained tokens, at least 1.
        rejected_lengths: ``[P]``.
        beta: Factor of the reward, > 0.
        gamma: Target margin, in units of reward, >= 0.

    Returns:
        ``[P]`` nats, with grad.
    """
    check_same_shape(chosen_logprobs=chosen_logprobs, rejected_logprobs=rejected_logprobs)
    chosen = per_token(chosen_logprobs, chosen_lengths)
    rejected = per_token(rejected_logprobs, rejected_lengths)
    return -logsigmoid(beta * (chosen - rejected) - gamma)


def log_odds(mean_logprobs: torch.Tensor) -> torch.Tensor:
    r"""Logarithm of the odds ``p / (1 - p)`` for ``p = exp(mean_logprobs)``.

    ``mean_logprobs - log(1 - exp(mean_logprobs))``, computed with ``expm1``, and with the argument bounded to
    at most -1e-6, because at p = 1 the odds are infinite and their gradient not a number.

    Args:
        mean_logprobs: Any shape, at most 0, with grad.

    >>> log_odds(torch.tensor([0.5]).log()).abs().item() < 1e-6
    True
    """
    bounded = mean_logprobs.clamp(max=-1e-6)
    return bounded - torch.log(-torch.expm1(bounded))


def orpo_loss(
    chosen_logprobs: torch.Tensor,
    rejected_logprobs: torch.Tensor,
    chosen_lengths: torch.Tensor,
    rejected_lengths: torch.Tensor,
    *,
    odds_weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Odds-ratio preference optimisation: SFT on the chosen completion and a push on the odds ratio.

    .. math:: -\frac{\log\pi(y_c|x)}{|y_c|} - \lambda\log\sigma\big(\mathrm{logodds}(y_c) -
        \mathrm{logodds}(y_r)\big)

    Source: Hong et al. 2024 (arXiv 2403.07691), eqs. 6 and 7; p in the odds is the geometric mean of the
    token probabilities (eq. 3). The SFT part is a mean over the tokens of each completion and then over
    pairs; TRL takes it over all tokens of the batch.

    Args:
        chosen_logprobs: ``[P]`` sums over trained tokens, with grad.
        rejected_logprobs: ``[P]``, with grad.
        chosen_lengths: ``[P]`` trained tokens, at least 1.
        rejected_lengths: ``[P]``.
        odds_weight: lambda, >= 0.

    Returns:
        The loss ``[P]``, nats, with grad; and the logarithm of the odds ratio ``[P]``, with grad.
    """
    check_same_shape(chosen_logprobs=chosen_logprobs, rejected_logprobs=rejected_logprobs)
    chosen = per_token(chosen_logprobs, chosen_lengths)
    ratio = log_odds(chosen) - log_odds(per_token(rejected_logprobs, rejected_lengths))
    return -chosen - odds_weight * logsigmoid(ratio), ratio


def kto_loss(
    log_ratios: torch.Tensor,
    *,
    is_desirable: bool,
    kl_baseline: torch.Tensor | float,
    beta: float,
    weight: float,
) -> torch.Tensor:
    r"""Kahneman-Tversky optimisation, for completions that are labelled good or bad one by one.

    .. math:: \lambda\,\big(1 - \sigma(\pm\beta\,(l - z_0))\big), \quad + \text{ if desirable, } -
        \text{ if not}

    Source: Ethayarajh et al. 2024 (arXiv 2402.01306), eq. 8: ``lambda_y - v``. Beta stands in the value
    function and the reward is the log-ratio itself. z_0 is their estimate of KL(policy || reference): the
    mean log-ratio of completions under *other* prompts, at least 0, without gradient.

    Args:
        log_ratios: ``[N]`` from :func:`log_ratio`, all desirable or all not, with grad.
        is_desirable: Which.
        kl_baseline: z_0 in nats, >= 0: 0-d, no grad; the same for all micro-batches of a step.
        beta: > 0.
        weight: lambda_D or lambda_U, > 0.

    Returns:
        ``[N]`` in (0, weight), with grad.

    >>> kto_loss(torch.tensor([1.0]), is_desirable=True, kl_baseline=1.0, beta=0.1, weight=2.0).tolist()
    [1.0]
    """
    sign = 1.0 if is_desirable else -1.0
    return weight * torch.sigmoid(-sign * beta * (log_ratios - kl_baseline))
