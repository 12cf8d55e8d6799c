"""Errors that titan_rl raises on purpose.

Every message has the form ``<where> must <constraint>; got <value>. <what to do>.`` so that it can be
acted on without reading the code. Standard library only.
"""


class TitanRLError(Exception):
    """Base of all errors raised on purpose by titan_rl."""


class ConfigError(TitanRLError):
    """The user's input (configuration, data file, model directory) cannot be used as it is."""

    def __init__(self, where: str, constraint: str, got: object, remedy: str) -> None:
        """Compose the message.

        Args:
            where: What is wrong: a key (``sampling.group_size``), a file, or ``file:line: key``.
            constraint: What it must be or do, in the words that follow "must".
            got: The offending value, shown with ``repr`` unless it is a string with spaces.
            remedy: One sentence that says what to do.

        >>> str(ConfigError("sampling.group_size", "be at least 2", 1, "Set group_size = 8."))
        'sampling.group_size must be at least 2; got 1. Set group_size = 8.'
        """
        self.where, self.constraint, self.got, self.remedy = where, constraint, got, remedy
        shown = got if isinstance(got, str) and " " in got else repr(got)
        super().__init__(f"{where} must {constraint}; got {shown}. {remedy}")

    def __reduce__(self) -> tuple[type, tuple[str, str, object, str]]:
        return type(self), (self.where, self.constraint, self.got, self.remedy)


class GeneratorError(TitanRLError):
    """The generator failed, ran past its deadline, or returned something that must not be trained on."""


class HandshakeError(TitanRLError):
    """The generator does not provably serve the weights that were pushed to it."""


class StopRequestedError(TitanRLError):
    """Work was given up, on all ranks alike, because the run was asked to stop."""


class RewardError(TitanRLError):
    """A reward could not be computed for one rollout. The sample is dropped and counted."""


class NonFiniteError(TitanRLError):
    """A value that titan_rl computed (loss, log-probability, gradient) is NaN or infinite."""


class RollBackError(TitanRLError):
    """The run has to go back to its last checkpoint. Raised on all ranks alike, and caught by the trainer."""


class SaveError(TitanRLError):
    """A checkpoint could not be written, and the run cannot go on without it."""
