"""Tables whose ``type`` follows from another key of the file: a preset that one value names. No torch.

``[algorithm] type = "ppo"`` makes ``[advantage]`` one of type ``gae``, so that a file may set ``[advantage]
lambda_policy`` and nothing else. Which value chooses what is written into the shipped schema; here a table is
given what was chosen before it is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from titan_rl.config.locations import Locate, show_where
from titan_rl.config.registry import CUSTOM_PATTERN, unknown_name
from titan_rl.config.validation import Schema
from titan_rl.errors import ConfigError

PRESETS = "x-presets"
"""At the root of a schema: by the dotted key that names a preset, and by its value, nested tables with the
``type`` of each."""


def with_chosen_types(table: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Return a table in which the tables that a preset fills state their ``type``.

    A preset of the user's own (``package.module:function``) is not imported here: tables without a ``type``
    that it may choose are left out, and are checked when it is.

    Args:
        table: What the file says. It is not changed.
        schema: Its JSON Schema.
    """
    filled = dict(table)
    for name, presets, _ in _named(table, schema):
        if name in presets:
            filled = _fill_in(filled, presets[name])
        else:
            for types in presets.values():
                filled = _leave_out(filled, types)
    return filled


def unknown_presets(table: Mapping[str, Any], schema: Schema, locate: Locate | None) -> list[ConfigError]:
    """Return an error for every preset that is neither known nor of the form ``package.module:function``.

    Args:
        table: What the file says.
        schema: Its JSON Schema.
        locate: Gives the location of a key path.
    """
    return [
        unknown_name(name, presets, show_where(path, locate))
        for name, presets, path in _named(table, schema)
        if name not in presets and re.match(CUSTOM_PATTERN, name) is None
    ]


def types_in(table: Mapping[str, Any]) -> dict[str, Any]:
    """Keep of a nested table the ``type`` of each table in it.

    >>> types_in({"type": "gae", "gamma": 1.0, "inner": {"eps": 1.0}, "kl": {"type": "reference"}})
    {'type': 'gae', 'kl': {'type': 'reference'}}
    """
    kept: dict[str, Any] = {}
    for key, value in table.items():
        inner = types_in(value) if isinstance(value, Mapping) else value if key == "type" else None
        if inner:
            kept[key] = inner
    return kept


def _named(
    table: Mapping[str, Any], schema: Schema
) -> Iterator[tuple[str, Mapping[str, Any], tuple[str, ...]]]:
    """The name of each preset in the table, all that there are, and the path of its key."""
    for key, presets in schema.get(PRESETS, {}).items():
        path = tuple(key.split("."))
        name = _find(table, path, _default(schema, path))
        if isinstance(name, str):  # anything else is an error of its own
            yield name, presets, path


def _fill_in(table: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    filled = dict(table)
    for key, chosen in types.items():
        if key == "type":
            filled.setdefault(key, chosen)
        elif isinstance(filled.get(key), Mapping):
            filled[key] = _fill_in(filled[key], chosen)
    return filled


def _leave_out(table: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict(table)
    for key, chosen in types.items():
        below = kept.get(key)
        if key == "type" or not isinstance(below, Mapping):
            continue
        if "type" in chosen and "type" not in below:
            del kept[key]
        else:
            kept[key] = _leave_out(below, chosen)
    return kept


def _find(table: Any, path: tuple[str, ...], default: Any) -> Any:
    for key in path:
        if not isinstance(table, Mapping) or key not in table:
            return default
        table = table[key]
    return table


def _default(schema: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        options = [schema, *schema.get("anyOf", ())]
        schema = next(option["properties"][key] for option in options if key in option.get("properties", {}))
    return schema.get("default")
