"""The ``exact_match`` reward: the completion is the answer, character for character."""

from dataclasses import dataclass

from titan_rl.rewards.answers import reference_answer
from titan_rl.types import Rollout


class ExactMatch:
    r"""1 when the last completion's text is the reference answer, else 0.

    .. math:: r(x, y) = \mathbf 1[\mathrm{strip}(y) = \mathrm{strip}(a_x)]

    The exact-match metric of extractive question answering (Rajpurkar et al. 2016, arXiv 1606.05250, section
    6.1), without its removal of punctuation and articles.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """How texts are compared."""

        ignore_case: bool = False
        """Compare after Unicode case folding."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, rollout: Rollout) -> float:
        """Score one rollout.

        Args:
            rollout: Its prompt must have an answer.

        Returns:
            1.0 or 0.0.

        Raises:
            RewardError: The prompt has no answer.
        """
        completion, answer = rollout.text.strip(), reference_answer(rollout).strip()
        if self.config.ignore_case:
            completion, answer = completion.casefold(), answer.casefold()
        return float(completion == answer)
