"""A reward that says what it finds in its environment. It runs in worker processes without torch."""

from __future__ import annotations

import os

from titan_rl.types import Rollout


def tells_its_environment(rollout: Rollout) -> float:
    """Raises for the first rollout of each group, with everything that looks like a canary."""
    if rollout.sample_index == 0:
        raise ValueError(" ".join(value for value in os.environ.values() if "canary" in value))
    return float(any(character.isdigit() for character in rollout.text))
