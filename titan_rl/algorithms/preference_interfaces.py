"""What losses on preferences receive and return, and the metrics that all of them report.

The maths is in :mod:`titan_rl.functional.preference`; which losses exist is in
:mod:`titan_rl.algorithms.preference_registry`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from titan_rl.algorithms.interfaces import LossOutput


@dataclass(frozen=True, slots=True)
class PreferenceNeeds:
    """What a loss asks of the rest of the system.

    Attributes:
        reference: Log-probabilities under the reference.
        pairs: Both completions of every preference; otherwise single, labelled ones serve too.
        kl_baseline: The mean log-ratio of policy and reference on completions of other prompts.
    """

    reference: bool = False
    pairs: bool = True
    kl_baseline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompletionScores:
    """What is known of N completions of one side.

    Attributes:
        values: ``[N]`` fp32 with grad: the policy's log-probability, summed over the trained tokens; or the
            reward model's reward.
        lengths: ``[N]`` fp32, trained tokens.
        ref_logprobs: ``[N]`` fp32 under the reference, no grad; None without one.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    ref_logprobs: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreferenceInputs:
    """The preferences of one micro-batch.

    Attributes:
        chosen: The better completions, or those labelled good.
        rejected: The worse ones, or those labelled bad. With pairs, the n-th belongs to the n-th chosen one.
        margins: ``[N]`` fp32, of the pairs: by how much the chosen one is better; 0 where unknown.
        num_chosen: Chosen completions of the optimiser step over all ranks and micro-batches; with pairs
            their number.
        num_rejected: The same of rejected ones.
        kl_baseline: 0-d, no grad, >= 0; the same for all micro-batches of the step. None if not asked for.
    """

    chosen: CompletionScores
    rejected: CompletionScores
    margins: torch.Tensor
    num_chosen: int
    num_rejected: int
    kl_baseline: torch.Tensor | None = None


class PreferenceLoss(Protocol):
    """From scores of completions to this micro-batch's share of the step's loss."""

    @property
    def needs(self) -> PreferenceNeeds:
        """What it asks of the rest of the system."""
        ...

    def __call__(self, inputs: PreferenceInputs) -> LossOutput:
        """The loss, divided by a global count, and metrics; shares add up over micro-batches and ranks."""
        ...


def over(total: torch.Tensor, count: int) -> torch.Tensor:
    """A share of a mean: ``total / count``; 0 counts as 1, so that nothing is divided by nothing."""
    return total / max(count, 1)


def pair_metrics(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, inputs: PreferenceInputs
) -> dict[str, torch.Tensor]:
    """Metrics of pairs, from the rewards that the loss compares.

    Args:
        chosen_rewards: ``[P]``.
        rejected_rewards: ``[P]``.
        inputs: The pairs.

    Returns:
        ``accuracy/mean``: share of pairs whose chosen completion has the larger reward, a tie being half;
        ``margin/mean`` and ``margin_square/mean``: of the difference of rewards; and the mean reward of each
        side.
    """
    chosen, rejected = chosen_rewards.detach(), rejected_rewards.detach()
    right = (chosen > rejected).float() + 0.5 * (chosen == rejected).float()
    margins = (chosen - rejected).double()  # a variance will be the difference of two of these means
    return {
        "accuracy/mean": over(right.sum(), inputs.num_chosen),
        "margin/mean": over(margins.sum(), inputs.num_chosen),
        "margin_square/mean": over(margins.square().sum(), inputs.num_chosen),
        "chosen_reward/mean": over(chosen.sum(), inputs.num_chosen),
        "rejected_reward/mean": over(rejected.sum(), inputs.num_rejected),
    }


def logprob_metrics(inputs: PreferenceInputs) -> dict[str, torch.Tensor]:
    """Mean log-probability of each side's completions under the policy, in nats.

    Both can fall while their difference rises: the policy then moves away from what it was shown.
    """
    return {
        "chosen_logprob/mean": over(inputs.chosen.values.detach().sum(), inputs.num_chosen),
        "rejected_logprob/mean": over(inputs.rejected.values.detach().sum(), inputs.num_rejected),
    }
