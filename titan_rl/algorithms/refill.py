"""Dynamic sampling: groups that teach nothing are replaced until the batch is full, within a budget.

Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.2. The replacing is the trainer's; this decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from titan_rl.types import Group


@dataclass(kw_only=True, slots=True)
class RefillSection:
    """Table ``[refill]``."""

    max_rounds: Annotated[int, Ge(0)] = 0
    """Replace groups whose rewards are all equal (to the greedy rollout's, where there is one) by groups of
    further prompts, in at most this many rounds of generation per iteration; 0 is off. The run ends with an
    error when the last round leaves a gap."""


def has_signal(group: Group) -> bool:
    """Whether a group teaches: its rewards differ, among each other or from its baseline's.

    A group whose baseline has no reward teaches nothing, because it has no advantages.
    """
    rewards = {rollout.reward.total for rollout in group.rollouts if rollout.reward is not None}
    if group.baseline is None:
        return len(rewards) > 1
    baseline = group.baseline.reward
    return baseline is not None and bool(rewards - {baseline.total})
