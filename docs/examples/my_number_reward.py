"""A reward of one's own. In a file without torch, so that reward workers start fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from titan_rl.errors import RewardError
from titan_rl.types import Rollout


class CloseNumber:
    """1 for the right number, less the farther away, 0 beyond ``tolerance`` or without a number."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Further keys of the ``[[reward]]`` table."""

        tolerance: Annotated[float, Gt(0)] = 10.0
        """Distance at which nothing is left of the reward."""

    def __init__(self, config: Config) -> None:
        self.tolerance = config.tolerance

    def __call__(self, rollout: Rollout) -> float:
        """Score of one rollout."""
        if rollout.prompt.answer is None:
            raise RewardError(f"prompt {rollout.prompt.id!r} has no answer")
        try:
            distance = abs(float(rollout.text) - float(rollout.prompt.answer))
        except ValueError:
            return 0.0
        value = 1.0 - distance / self.tolerance
        return value if value > 0 else 0.0  # "nan" is a number to float() and must earn nothing
