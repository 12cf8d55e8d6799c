"""Rewards for runs of every algorithm. They run in worker processes without torch."""

from __future__ import annotations

import math

from titan_rl.types import Rollout


def graded(rollout: Rollout) -> float:
    """Differs within a group whatever the model says, a little by how many tokens it took."""
    return float(rollout.text[1:2] == "1") + 0.01 * rollout.sample_index


def odd(rollout: Rollout) -> float:
    """Not a number for one rollout of each group, and for all of a sum that begins with 5; else constant."""
    if rollout.sample_index == 1 or rollout.prompt.metadata["a"] == 5:
        return math.nan
    return 0.5
