"""The resolved configuration of a run as a table and as TOML: the inverse of the overlay."""

from __future__ import annotations

from typing import Any

from titan_rl.config.kinds import Array, Kind, Pick, Section, walk
from titan_rl.config.leaf import NONE, Leaf
from titan_rl.config.rules import As, Hidden, Rules
from titan_rl.config.validation import phrase
from titan_rl.config.writer import write


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
    """Return :func:`to_table` as TOML text.

    >>> import dataclasses
    >>> @dataclasses.dataclass(kw_only=True, slots=True)
    ... class Training:
    ...     steps: int = 100
    ...     seed: int | None = None
    >>> print(to_toml(Training()), end="")
    steps = 100
    seed = "none"
    """
    return write(to_table(instance, rules))


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
