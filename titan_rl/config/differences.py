"""What changed between two resolved configurations.

Used on resume: each key is then judged (free, warned, refused) by whoever owns it, not here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """List the keys whose value differs.

    Tables are compared key by key and arrays of tables element by element; other arrays as a whole.

    Args:
        old: A nested table, as :func:`titan_rl.config.dump.to_table` makes it.
        new: Another one.

    Returns:
        Triples ``(dotted key, old value, new value)``, sorted by key; None stands for "not there" (TOML has
        no null, so it is no value).

    >>> diff({"training": {"steps": 10, "seq_len": 8}}, {"training": {"steps": 20, "seq_len": 8}})
    [('training.steps', 10, 20)]
    """
    return sorted(_differences(old, new, ""), key=lambda difference: difference[0])


def _differences(old: Any, new: Any, key: str) -> list[tuple[str, Any, Any]]:
    if _is_table(old) and _is_table(new):
        pairs = {name: (old.get(name), new.get(name)) for name in [*old, *(set(new) - set(old))]}
    elif _is_tables(old) and _is_tables(new) and len(old) == len(new):
        pairs = {str(index): pair for index, pair in enumerate(zip(old, new, strict=True))}
    else:
        return [] if _equal(old, new) else [(key, old, new)]
    return [
        difference
        for name, (before, after) in pairs.items()
        for difference in _differences(before, after, f"{key}.{name}" if key else name)
    ]


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_table(item) for item in value)


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, Sequence) and isinstance(new, Sequence) and not isinstance(old, str):
        return len(old) == len(new) and all(_equal(a, b) for a, b in zip(old, new, strict=True))
    if isinstance(old, float) and isinstance(new, float) and math.isnan(old) and math.isnan(new):
        return True
    return old == new and isinstance(old, bool) == isinstance(new, bool)
