"""Key paths, where they were written, and several errors raised as one.

What a position is stands in :mod:`titan_rl.config.toml`; this module only says how positions are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from titan_rl.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""Path of a key: ``("reward", 0, "weight")`` is the weight of the first ``[[reward]]``."""

Location = tuple[str, int | None]
"""File and line (from 1); the line is None where there is none, as on the command line."""

Locate = Callable[[Sequence[str | int]], Location]
"""Gives the location of a key path, or of the nearest section around it."""

MAX_REPORTED = 10
"""Errors shown together; more would scroll the first one away."""


def show_path(path: Sequence[str | int]) -> str:
    """Show a key path with dots.

    >>> show_path(("reward", 0, "weight"))
    'reward.0.weight'
    """
    return ".".join(str(part) for part in path) or "the configuration"


def show_where(path: Sequence[str | int], locate: Locate | None) -> str:
    """Show where a key was written: ``run.toml:12: training.steps``."""
    if locate is None:
        return show_path(path)
    file, line = locate(path)
    return f"{file}: {show_path(path)}" if line is None else f"{file}:{line}: {show_path(path)}"


class ManyConfigError(ConfigError):
    """Several errors of one configuration, one a line.

    ``errors`` holds them; the other attributes are those of the first.
    """

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        """Join the errors.

        Args:
            errors: At least one.
        """
        first = errors[0]
        super().__init__(first.where, first.constraint, first.got, first.remedy)
        self.errors = tuple(errors)

    def __str__(self) -> str:
        shown = [str(error) for error in self.errors[:MAX_REPORTED]]
        hidden = len(self.errors) - len(shown)
        return "\n".join([*shown, f"({hidden} more errors)"] if hidden else shown)

    def __reduce__(self) -> Any:
        return type(self), (self.errors,)


def raise_all(errors: Sequence[ConfigError]) -> None:
    """Raise nothing, the one error, or all of them as :class:`ManyConfigError`.

    Raises:
        ConfigError: There is at least one error. Errors with the same text are raised once.
    """
    unique = list({str(error): error for error in errors}.values())
    if len(unique) == 1:
        raise unique[0]
    if unique:
        raise ManyConfigError(unique)
