"""The ``format`` reward: the completion has the shape that a regular expression describes."""

import re
from dataclasses import dataclass

from titan_rl.errors import ConfigError
from titan_rl.types import Rollout


class Format:
    r"""1 when the whole last completion matches a regular expression, else 0.

    .. math:: r(x, y) = \mathbf 1[y \in L(\text{pattern})]

    The format reward of DeepSeek-R1-Zero (DeepSeek-AI 2025, arXiv 2501.12948, section 2.2.2), whose tags
    would be ``(?s)<think>.*?</think>\s*<answer>.*?</answer>\s*``. The text is not stripped. A ``.`` matches
    no line break unless the pattern starts with ``(?s)``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """What a well-formed completion looks like."""

        pattern: str
        """Regular expression in Python's ``re`` syntax, matched against the whole text."""

    def __init__(self, config: Config) -> None:
        """Compile the pattern.

        Args:
            config: See :class:`Config`.

        Raises:
            ConfigError: The pattern is not a regular expression.
        """
        try:
            self._pattern = re.compile(config.pattern)
        except re.error as error:
            raise ConfigError(
                "reward.pattern",
                "be a regular expression in the syntax of Python's re module",
                config.pattern,
                f"Correct it: {error}.",
            ) from error

    def __call__(self, rollout: Rollout) -> float:
        """Score one rollout.

        Args:
            rollout: Any rollout; no answer is needed.

        Returns:
            1.0 or 0.0.
        """
        return float(self._pattern.fullmatch(rollout.text) is not None)
