"""The ``math_verify`` reward: the completion's mathematical answer is equivalent to the reference answer.

Parsing and equivalence are the math-verify package's; what is ours is the reading of the reference answer.
"""

import logging
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge
from math_verify import parse, verify

from titan_rl.errors import RewardError
from titan_rl.rewards.answers import reference_answer
from titan_rl.types import Rollout

_LATEX_DELIMITERS = ("$", "\\boxed", "\\(", "\\[", "\\begin")

# The package warns that its own timeouts are off. They are off on purpose: they work by SIGALRM, which a
# worker's deadline makes superfluous, and which SymPy code can swallow.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class MathVerify:
    r"""1 when the completion's answer is mathematically equal to the reference answer, else 0.

    .. math:: r(x, y) = \mathbf 1[\mathrm{parse}(a_x) \equiv \mathrm{parse}(y)]

    with parse and the equivalence of Math-Verify (Kydlíček, Hugging Face, 2024,
    https://github.com/huggingface/Math-Verify): LaTeX or plain expressions are extracted (a ``\boxed{}`` or a
    "final answer is" first), turned into SymPy objects, and compared numerically and symbolically; sets,
    intervals, matrices and equations too. An unparsable completion scores 0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """How strictly answers are compared."""

        strict: bool = True
        """Names of variables matter, and a set never equals a tuple."""

        float_rounding: Annotated[int, Ge(0)] = 6
        """Decimals to which floating-point numbers are rounded before they are compared."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, rollout: Rollout) -> float:
        """Score one rollout.

        Args:
            rollout: Its prompt must have an answer, in LaTeX (with or without ``$``) or plain.

        Returns:
            1.0 or 0.0.

        Raises:
            RewardError: The prompt has no answer, or its answer cannot be parsed.
        """
        answer = reference_answer(rollout)
        # LaTeX is recognised between delimiters only; a bare "\frac{1}{2}" gets them.
        is_delimited = any(mark in answer for mark in _LATEX_DELIMITERS)
        expected = parse(answer if is_delimited else f"\\boxed{{{answer}}}", parsing_timeout=0)
        if not expected:
            raise RewardError(
                f"the answer of prompt {rollout.prompt.id!r} must be a mathematical expression; "
                f"got {answer!r}. Use exact_match for such answers."
            )
        given = parse(rollout.text, parsing_timeout=0)
        is_equal = verify(
            expected,
            given,
            strict=self.config.strict,
            float_rounding=self.config.float_rounding,
            timeout_seconds=None,  # off, like parsing_timeout=0 above: the worker's deadline is ours
        )
        return float(is_equal)
