"""When to end a run that skips one step after another: for the policy's steps and for the critic's."""

from __future__ import annotations

from titan_rl.errors import NonFiniteError


class SkipLimit:
    """Counts skipped steps in a row. A step that is applied starts the count again."""

    def __init__(self, largest: int, *, of: str = "", look_at: str) -> None:
        """Start at 0, as after every start of the run.

        Args:
            largest: ``resilience.max_skipped_steps``: so many in a row are put up with.
            of: Whose steps, for the message; empty for the policy.
            look_at: Where the cause is to be found, for the message.
        """
        self._largest, self._look_at = largest, look_at
        self._steps = f"steps of {of}" if of else "steps"
        self._in_a_row = 0

    def applied(self) -> None:
        """A step changed the weights."""
        self._in_a_row = 0

    def skipped(self, cause: str) -> None:
        """A step changed nothing.

        Args:
            cause: Why, as a clause.

        Raises:
            NonFiniteError: It is one too many in a row.

        >>> limit = SkipLimit(1, of="the critic", look_at="the returns")
        >>> limit.skipped("the gradient norm is inf")
        >>> limit.skipped("the gradient norm is nan")
        Traceback (most recent call last):
        ...
        titan_rl.errors.NonFiniteError: 2 steps of the critic in a row were skipped, more than \
resilience.max_skipped_steps; the last because the gradient norm is nan. Look at the returns.
        """
        self._in_a_row += 1
        if self._in_a_row > self._largest:
            raise NonFiniteError(
                f"{self._in_a_row} {self._steps} in a row were skipped, more than "
                f"resilience.max_skipped_steps; the last because {cause}. Look at {self._look_at}."
            )
