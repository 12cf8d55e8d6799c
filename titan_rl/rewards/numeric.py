"""The ``numeric`` reward: a number in the completion equals the reference answer, exactly.

Here also lives the reading of numbers from text. Algebra, sets and intervals belong to ``math_verify``.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from titan_rl.errors import ConfigError, RewardError
from titan_rl.rewards.answers import reference_answer
from titan_rl.types import Rollout

_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?"
# A sign right after a word or a closing bracket is a binary minus ("10-5", "10 - 5") or a hyphen ("step-3").
_SIGN = r"(?:(?<![\w.)\]}])[+-]|(?<![\w.)\]}])(?<![\w.)\]}]\s)[+-]\s)?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})\$?(?:"
    rf"\\[dt]?frac\s*\{{\s*(?P<top>[+-]?{_UNSIGNED})\s*\}}\s*\{{\s*(?P<bottom>{_UNSIGNED})\s*\}}"
    rf"|(?P<number>{_UNSIGNED})(?:\s?/\s?(?P<divisor>{_UNSIGNED}))?)"
)
_LATEX_NOISE = re.compile(r"\\[,!;: ]|\\left|\\right")
_BOXED = "\\boxed{"


class Numeric:
    r"""1 when the number that the completion gives equals the number in the answer, else 0.

    .. math:: r(x, y) = \mathbf 1[\mathrm{number}(y) = \mathrm{number}(a_x)]

    The accuracy rule of GSM8K (Cobbe et al. 2021, arXiv 2110.14168), whose answers follow ``####``. Numbers
    are read as exact decimals and compared as exact fractions: ``1,234.50`` = ``1234.5``, ``3/4`` = ``0.75``
    = ``\frac{3}{4}``. Currency and percent signs are ignored. A completion without such a number scores 0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Which number of the completion counts."""

        number: Literal["whole", "last", "after_marker", "boxed"] = "last"
        """``whole``: the text is nothing but a number. ``last``: the last number of the text.
        ``after_marker``: the first number after the last ``marker``. ``boxed``: the content of the last
        ``\\boxed{}`` is nothing but a number."""

        marker: str = "####"
        """What precedes the number with ``number = "after_marker"``. In the reference answer, whatever stands
        up to the last marker is skipped in every mode."""

    def __init__(self, config: Config) -> None:
        """Check the configuration.

        Args:
            config: See :class:`Config`.

        Raises:
            ConfigError: ``number`` names no mode, or ``marker`` is empty.
        """
        if config.number not in _READERS:
            modes = ", ".join(map(repr, _READERS))
            raise ConfigError("reward.number", f"be one of {modes}", config.number, "Choose one of them.")
        if not config.marker:
            raise ConfigError("reward.marker", "not be empty", config.marker, 'GSM8K uses "####".')
        self.config = config

    def __call__(self, rollout: Rollout) -> float:
        """Score one rollout.

        Args:
            rollout: Its prompt must have an answer that is a number.

        Returns:
            1.0 or 0.0.

        Raises:
            RewardError: The prompt has no answer, or its answer is not a number.
        """
        answer = reference_answer(rollout)
        expected = whole_number(answer.rpartition(self.config.marker)[2])
        if expected is None:
            raise RewardError(
                f"the answer of prompt {rollout.prompt.id!r} must be a number for the numeric reward; "
                f"got {answer!r}. Use math_verify or exact_match for such answers."
            )
        return float(_READERS[self.config.number](rollout.text, self.config.marker) == expected)


def whole_number(text: str) -> Fraction | None:
    r"""Read a text that is nothing but one number.

    Args:
        text: For instance ``" $1,234.50 "``, ``"-3/4"``, ``"\frac{1}{2}"``, ``"50%"``.

    Returns:
        Its exact value, or None when the text is anything else.

    >>> whole_number("$1,234.50"), whole_number("-3/4"), whole_number("5 apples")
    (Fraction(2469, 2), Fraction(-3, 4), None)
    """
    cleaned = _clean(text).strip().strip("$").rstrip("%.").strip()
    match = _NUMBER.fullmatch(cleaned)
    return None if match is None else _value(match)


def last_number(text: str) -> Fraction | None:
    """Read the last number of a text.

    Args:
        text: Any text.

    Returns:
        Its exact value, or None when there is no number.

    >>> last_number("5 - 2 = 3, so she has 3.00 dollars left.")
    Fraction(3, 1)
    """
    match = None
    for match in _NUMBER.finditer(_clean(text)):  # noqa: B007  (only the last one counts)
        pass
    return None if match is None else _value(match)


def _number_after_marker(text: str, marker: str) -> Fraction | None:
    _, found, rest = text.rpartition(marker)
    match = _NUMBER.search(_clean(rest)) if found else None
    return None if match is None else _value(match)


def _boxed_number(text: str, _marker: str) -> Fraction | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth, begin = 1, start + len(_BOXED)
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return whole_number(text[begin:position])
    return None


_READERS = {
    "whole": lambda text, _marker: whole_number(text),
    "last": lambda text, _marker: last_number(text),
    "after_marker": _number_after_marker,
    "boxed": _boxed_number,
}


def _clean(text: str) -> str:
    """Write minus signs, LaTeX thousands separators and escaped signs the plain way."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",").replace("\\$", "$").replace("\\%", "%")
    return _LATEX_NOISE.sub("", text)


def _value(match: re.Match[str]) -> Fraction | None:
    above = match["top"] or match["number"]
    below = match["bottom"] or match["divisor"] or "1"
    # Decimal reads any number of digits exactly; int and Fraction refuse strings past 4,300 digits.
    numerator, denominator = (Fraction(Decimal(part.replace(",", ""))) for part in (above, below))
    if denominator == 0:
        return None
    return (-1 if "-" in match["sign"] else 1) * numerator / denominator
