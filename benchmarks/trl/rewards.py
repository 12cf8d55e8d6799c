"""The rewards of the workloads: plain functions of the text, the same ones for every side."""

from __future__ import annotations

import re
from collections.abc import Callable

from titan_rl.types import Rollout

_NUMBER = re.compile(r"-?\d+")


def digit_fraction(text: str, answer: str | None = None) -> float:
    """Share of digits among the characters of a completion: a random model begins near a tenth.

    Args:
        text: The completion.
        answer: Not used.

    >>> digit_fraction("a1b2")
    0.5
    """
    return sum(character.isdigit() for character in text) / len(text) if text else 0.0


def last_number(text: str, answer: str | None = None) -> float:
    """1 when the last whole number of a completion is the answer, else 0.

    Args:
        text: The completion.
        answer: What it should be.

    >>> last_number("3 + 4 is 7.", "7")
    1.0
    """
    found = _NUMBER.findall(text)
    return float(bool(found) and found[-1] == answer)


REWARDS: dict[str, Callable[[str, str | None], float]] = {
    "digit_fraction": digit_fraction,
    "last_number": last_number,
}


def digit_fraction_of_rollout(rollout: Rollout) -> float:
    """:func:`digit_fraction`, as a ``[[reward]]`` of titan_rl."""
    return digit_fraction(rollout.text)


def last_number_of_rollout(rollout: Rollout) -> float:
    """:func:`last_number`, as a ``[[reward]]`` of titan_rl."""
    return last_number(rollout.text, rollout.prompt.answer)
