"""Score the policy on held-out prompts: mean reward and pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from titan_rl.types import Group


@dataclass(kw_only=True, slots=True)
class EvaluationSection:
    """Table ``[evaluation]``. Held-out prompts are scored before the first step, every so often, and last."""

    interval_steps: Annotated[int, Ge(0)] = 0
    """Evaluate when the optimiser step is a multiple of this; 0: only before the first and after the last."""

    num_prompts: Annotated[int, Ge(1)] = 200
    """Held-out prompts scored, the first ones of the held-out split; fewer if it is smaller."""

    samples_per_prompt: Annotated[int, Ge(1)] = 1
    """Completions per prompt, k of pass@k. More than 1 needs a temperature above 0."""

    temperature: Annotated[float, Ge(0)] = 0.0
    """Sampling temperature; 0 is greedy."""

    pass_threshold: float = 1.0
    """A completion passes when its total reward is at least this; the score is the share that passes."""

    minimum_gain: float | None = None
    """The run fails unless the score rose by at least this from before the first step to after the last."""


@dataclass(frozen=True, slots=True)
class EvaluationTotals:
    """Sums over this rank's groups, to be added up over ranks.

    Attributes:
        num_prompts: Prompts with at least one scored completion.
        num_scored: Scored completions.
        num_passed: Scored completions that pass.
        reward: Sum of total rewards.
        pass_at_k: Sum over prompts of the estimate of :func:`pass_at_k`.
        num_tokens: Tokens of the scored completions.
        num_failed: Completions whose reward failed; they score nothing and are left out.
    """

    num_prompts: float
    num_scored: float
    num_passed: float
    reward: float
    pass_at_k: float
    num_tokens: float
    num_failed: float


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    r"""Unbiased estimate of the probability that at least one of k samples passes.

    :math:`1 - \binom{n-c}{k} / \binom{n}{k}` (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Args:
        num_samples: n, completions scored, at least k.
        num_passed: c, of which passed.
        k: Samples drawn.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def total_up(groups: Sequence[Group], *, pass_threshold: float) -> EvaluationTotals:
    """Add up this rank's held-out groups.

    Args:
        groups: Scored groups.
        pass_threshold: Total reward from which on a completion passes.
    """
    num_prompts = num_scored = num_passed = num_tokens = num_failed = 0
    reward = at_k = 0.0
    for group in groups:
        rewards = [r.reward.total for r in group.rollouts if r.reward is not None]
        num_failed += len(group.rollouts) - len(rewards)
        if not rewards:
            continue
        scored = (r for r in group.rollouts if r.reward is not None)
        num_tokens += sum(len(r.turns[-1].completion.token_ids) for r in scored)
        passed = sum(value >= pass_threshold for value in rewards)
        num_prompts += 1
        num_scored += len(rewards)
        num_passed += passed
        reward += sum(rewards)
        at_k += pass_at_k(len(rewards), passed, len(rewards))
    return EvaluationTotals(
        num_prompts=num_prompts,
        num_scored=num_scored,
        num_passed=num_passed,
        reward=reward,
        pass_at_k=at_k,
        num_tokens=num_tokens,
        num_failed=num_failed,
    )
