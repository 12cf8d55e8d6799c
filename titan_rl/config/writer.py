"""TOML text from a nested table: the inverse of ``tomli.loads``.

Small because configurations are small: strings, numbers, booleans, arrays and tables, no dates.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def inline(value: Any) -> str:
    """Write one value on one line.

    >>> inline({"names": ["a", "b"], "limit": float("inf"), "on": True})
    '{names = ["a", "b"], limit = inf, on = true}'

    Raises:
        TypeError: TOML has no such value (None, for example).
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON escapes are TOML escapes; TOML wants DEL escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {inline(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    raise TypeError(f"TOML has no value for {value!r} of type {type(value).__name__}")


def write(table: Mapping[str, Any]) -> str:
    """Write a nested table as TOML text, plain keys of each table before its sub-tables.

    >>> print(write({"seed": 1, "reward": [{"weight": 2.0}], "training": {"steps": 5}}), end="")
    seed = 1
    <BLANKLINE>
    [[reward]]
    weight = 2.0
    <BLANKLINE>
    [training]
    steps = 5
    """
    return "".join(f"{line}\n" for line in _lines(table, "")).lstrip("\n")


def _lines(table: Mapping[str, Any], prefix: str) -> list[str]:
    sections = {key: value for key, value in table.items() if isinstance(value, Mapping) or _is_tables(value)}
    lines = [f"{_key(key)} = {inline(value)}" for key, value in table.items() if key not in sections]
    for key, value in sections.items():
        name = f"{prefix}{_key(key)}"
        header, items = (f"[{name}]", [value]) if isinstance(value, Mapping) else (f"[[{name}]]", value)
        for item in items:
            lines += ["", header, *_lines(item, f"{name}.")]
    return lines


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else inline(name)
