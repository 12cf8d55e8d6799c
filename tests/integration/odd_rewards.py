"""Rewards that fail, by the operands of the sum. They run in worker processes without torch."""

from __future__ import annotations

import time

from titan_rl.types import Rollout


def constant(rollout: Rollout) -> float:
    return 0.5


def fails_for_some(rollout: Rollout) -> float:
    """Raises for sums that begin with 5, and hangs on one rollout of those that begin with 6."""
    first = rollout.prompt.metadata["a"]
    if first == 5:
        raise ValueError(f"no reward for {rollout.prompt.id}")
    if first == 6 and rollout.sample_index == 3:
        time.sleep(600)
    return float(rollout.text[1:2] == "1")


def fails_for_most(rollout: Rollout) -> float:
    """Raises for all sums but those that begin with 9."""
    if rollout.prompt.metadata["a"] != 9:
        raise ValueError(f"no reward for {rollout.prompt.id}")
    return 1.0


def fails_for_all(rollout: Rollout) -> float:
    raise ValueError("no reward at all")
