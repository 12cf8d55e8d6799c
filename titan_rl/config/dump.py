"""The resolved configuration of a run as a table and as TOML: the inverse of the overlay."""

from __future__ import annotations

import re
from typing import Any

from titan_rl.config.kinds import Array, Kind, Pick, Section, walk
from titan_rl.config.leaf import NONE, Leaf
from titan_rl.config.rules import As, Hidden, Rules
from titan_rl.config.validation import phrase
from titan_rl.config.writer import write

REDACTED = "<redacted>"
"""Stands in written configurations in the place of a credential."""

_SECRET = re.compile(
    r"(^|_)(secret|password|passwd|passphrase|credential|(api|access|private|secret|auth)_?key)s?$"
    r"|^token$|(^|_)(hf|hub|api|auth|access|bearer|github|wandb)_?token$",
    re.IGNORECASE,
)


def to_table(instance: Any, rules: Rules | None = None) -> dict[str, Any]:
    """Return every value of a configuration as a nested table, hidden fields excepted.

    Overlaying the table on any instance of the same dataclass gives an equal instance, as far as hidden
    fields agree.

    Args:
        instance: A dataclass instance.
        rules: Adaptations of dataclasses that are not ours.

    Raises:
        TypeError: A value is not of the type that its field declares, or TOML cannot express it.
    """
    rules = rules or {}
    return {
        name: _value(field.kind, getattr(instance, name), rules)
        for name, field in walk(type(instance), rules).items()
        if not isinstance(field.kind, Hidden)
    }


def to_toml(instance: Any, rules: Rules | None = None) -> str:
    """Return :func:`to_table` as TOML text, in which what looks like a credential is :data:`REDACTED`.

    Such are strings under keys like ``api_key``, ``hf_token`` or ``password``: a class of a user's own may
    have them, and the text goes into the output directory and into every checkpoint.

    >>> import dataclasses
    >>> @dataclasses.dataclass(kw_only=True, slots=True)
    ... class Training:
    ...     steps: int = 100
    ...     seed: int | None = None
    >>> print(to_toml(Training()), end="")
    steps = 100
    seed = "none"
    """
    return write(_redacted(to_table(instance, rules)))


def _redacted(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _redacted(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_redacted(part, key) for part in value]
    return REDACTED if isinstance(value, str) and value and _SECRET.search(key) else value


def _value(kind: Kind, value: Any, rules: Rules) -> Any:
    if isinstance(kind, Leaf):
        if not kind.holds(value):
            raise TypeError(f"{value!r} is not {phrase(kind.schema)}")
        return kind.write(value)
    if isinstance(kind, Array):
        return [_value(kind.item, element, rules) for element in value]
    if isinstance(kind, As):
        return to_table(kind.to_owned(value), rules)
    if isinstance(kind, Pick) and (value is not None or kind.choice.none_name is not None):
        fields = {} if value is None else to_table(value, rules)
        return {"type": kind.choice.name_of(value), **fields}
    if value is None:
        return NONE
    return to_table(value, rules) if isinstance(kind, Section) else value
