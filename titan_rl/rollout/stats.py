"""Counts of rolling out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class RunStats:
    """Counts of one call, of the rollouts that this rank trains on.

    Attributes:
        num_rollouts: Rollouts generated.
        num_tokens: Completion tokens sampled.
        num_prompt_tokens: Prompt tokens, once per rollout.
        num_truncated: Completions that ended by a length limit.
        reward_failures: Failed rewards by reason.
        generation_seconds: Wall-clock time until the last completion.
        reward_seconds: Wall-clock time from then until the last reward.
    """

    num_rollouts: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_truncated: int = 0
    reward_failures: Counter[str] = field(default_factory=Counter)
    generation_seconds: float = 0.0
    reward_seconds: float = 0.0

    def add(self, other: RunStats) -> None:
        """Add the counts and seconds of another call."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
