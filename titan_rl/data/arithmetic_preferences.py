"""Preferences on sums: the right answer against a wrong one. No files, no network."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from titan_rl.data.arithmetic import Arithmetic
from titan_rl.data.datasets import Split, fingerprint_prompts
from titan_rl.data.preferences import with_preference
from titan_rl.resilience.seeds import derive_seed
from titan_rl.types import Prompt

Wrong = Literal["digit", "reversed", "mixed"]


class ArithmeticPreferences:
    """The problems of :class:`titan_rl.data.arithmetic.Arithmetic`, with a wrong answer beside the right one.

    Both answers have the same number of digits, so length gives nothing away. The wrong answer depends on the
    problem and ``split_seed`` alone.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Arithmetic.Config):
        """Which problems there are, and how their wrong answers are made."""

        wrong: Wrong = "mixed"
        """``"digit"``: one digit is another. ``"reversed"``: the digits stand in the opposite order, where
        that is another number, else as ``"digit"``. ``"mixed"``: one or the other, by a fair coin."""

    def __init__(self, config: Config, split: Split) -> None:
        """List the problems of one split.

        Raises:
            ConfigError: The range, the operations, the template or the number held out make no sense.
        """
        self._problems = Arithmetic(config, split)
        self._wrong: Wrong = config.wrong
        self._seed = config.split_seed
        self.name = "arithmetic preferences"
        self.fingerprint = fingerprint_prompts(self[index] for index in range(len(self)))

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int, /) -> Prompt:
        problem = self._problems[index]
        right = problem.answer or ""
        wrong = wrong_answer(right, self._wrong, seed=derive_seed("wrong answer", self._seed, problem.id))
        return with_preference(problem, chosen=right, rejected=wrong)


def wrong_answer(right: str, how: Wrong, *, seed: int) -> str:
    """Another number with as many digits.

    Args:
        right: The right answer, with or without a minus sign.
        how: As in :class:`ArithmeticPreferences.Config`.
        seed: Decides the digit, and the coin of ``"mixed"``.

    >>> wrong_answer("42", "reversed", seed=0), wrong_answer("33", "reversed", seed=0) != "33"
    ('24', True)
    """
    draw = random.Random(seed).random
    sign, digits = ("-", right[1:]) if right.startswith("-") else ("", right)
    reverse = how == "reversed" or (how == "mixed" and draw() < 0.5)
    if reverse and digits[::-1] != digits:
        return sign + digits[::-1]
    place = int(draw() * len(digits))
    other = (int(digits[place]) + 1 + int(draw() * 9)) % 10
    return sign + digits[:place] + str(other) + digits[place + 1 :]
