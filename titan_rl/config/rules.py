"""Rules that adapt dataclasses which titan_rl does not own (TorchTitan's) to the TOML file.

A rule is found by the dataclass and the field: ``{(TrainingConfig, "global_batch_size"): Hidden("Set
data.prompts_per_iteration.")}``. A rule of a base class holds for its subclasses. Which rules there are is
not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_rl.config.choice import Choice


@dataclass(frozen=True, slots=True)
class Hidden:
    """The key is refused and not shown.

    Attributes:
        remedy: One sentence: who sets it, or what to set instead.
    """

    remedy: str = "It is set by titan_rl."


@dataclass(frozen=True, slots=True)
class As:
    """The field appears in TOML as another dataclass, one of ours.

    Attributes:
        owned_type: The dataclass that TOML shows.
        from_owned: Makes the field's value from an ``owned_type`` instance. It may raise ValueError.
        to_owned: Makes an ``owned_type`` instance from the field's value; the inverse of ``from_owned``.
    """

    owned_type: type
    from_owned: Callable[[Any], Any]
    to_owned: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """Constraints of ``annotated_types`` that the annotation lacks: ``Limits((Ge(1),))``."""

    constraints: tuple[Any, ...]


Rule = Hidden | Choice | As | Limits
Rules = Mapping[tuple[type, str], Rule]


def find_rule(rules: Rules, owner: type, name: str) -> Rule | None:
    """Return the rule of a field, looked up in the dataclass and then in its bases."""
    return next((rules[(base, name)] for base in owner.__mro__ if (base, name) in rules), None)
