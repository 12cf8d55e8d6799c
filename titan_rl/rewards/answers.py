"""The reference answer of a rollout's prompt, for rewards that cannot do without one."""

from titan_rl.errors import RewardError
from titan_rl.types import Rollout


def reference_answer(rollout: Rollout) -> str:
    """Return ``rollout.prompt.answer``.

    Args:
        rollout: The rollout to score.

    Returns:
        The reference answer as the dataset holds it.

    Raises:
        RewardError: The prompt has no answer.
    """
    answer = rollout.prompt.answer
    if answer is None:
        raise RewardError(
            f"prompt {rollout.prompt.id!r} must have an answer; got None. "
            "Name the dataset's answer column, or use a reward that needs no answer."
        )
    return answer
