"""The command line as a document: ``--training.steps 200`` becomes ``{"training": {"steps": 200}}``.

The same checks then apply as to a file, with ``command line`` instead of file and line. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, time
from typing import Any

import tomli

from titan_rl.config.locations import KeyPath, Location
from titan_rl.config.toml import COMMAND_LINE, Document, merge_documents
from titan_rl.errors import ConfigError

_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


def parse_overrides(arguments: Sequence[str]) -> Document:
    """Parse ``--key value``, ``--key=value`` and ``--flag`` (true).

    Keys are dotted; a dash in a key equals an underscore; an integer selects an element of an array
    (``--reward.0.weight 2.0``). A value is read as a TOML value, and as a string when it is none. When a key
    is given twice the last one counts.

    Args:
        arguments: The arguments after the configuration file.

    Returns:
        A document; elements of arrays are tables with integer keys, which :func:`merge_documents`
        understands.

    Raises:
        ConfigError: An argument is not an override, or two overrides contradict one another.

    >>> parse_overrides(["--training.steps=200", "--reward.0.weight", "2.0", "--metrics.enable-wandb"]).table
    {'training': {'steps': 200}, 'reward': {0: {'weight': 2.0}}, 'metrics': {'enable_wandb': True}}
    """
    table: dict[Any, Any] = {}
    locations: dict[KeyPath, Location] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or _KEY.fullmatch(name) is None:
            remedy = "Write --section.key value, after the configuration file."
            raise ConfigError(
                COMMAND_LINE, "hold overrides of the form --section.key value", argument, remedy
            )
        path = tuple(int(part) if part.isdigit() else part.replace("-", "_") for part in name.split("."))
        if equals:
            value = _parse(text)
        else:
            has_value = bool(remaining) and not remaining[0].startswith("--")
            value = _parse(remaining.pop(0)) if has_value else True
        _place(table, path, value)
        for length in range(1, len(path)):
            locations[path[:length]] = (COMMAND_LINE, None)
        _locate(path, value, locations)
    return Document(table, COMMAND_LINE, locations)


def apply_overrides(document: Document, arguments: Sequence[str]) -> Document:
    """Return the document with the command line merged over it.

    Args:
        document: From :func:`titan_rl.config.toml.load_document`.
        arguments: As in :func:`parse_overrides`.

    Returns:
        A new document, whose overridden keys are located on the command line.

    Raises:
        ConfigError: As :func:`parse_overrides`, or an array has no such element.
    """
    return merge_documents(document, parse_overrides(arguments))


def _parse(text: str) -> Any:
    try:
        parsed = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError:
        return text
    # A text with line breaks could define further keys; a bare date or time is a name here, not a moment.
    is_value = parsed.keys() == {"value"} and not isinstance(parsed["value"], date | time)
    return parsed["value"] if is_value else text


def _place(table: dict[Any, Any], path: KeyPath, value: Any) -> None:
    for position, part in enumerate(path[:-1]):
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            where = f"{COMMAND_LINE}: {'.'.join(map(str, path[: position + 1]))}"
            remedy = "Give either the whole section or its single keys."
            raise ConfigError(where, "be a section, because a key in it is set", inner, remedy)
        table = inner
    below = table.get(path[-1])
    if isinstance(below, dict) and isinstance(value, dict):
        for key, inner in value.items():
            _place(below, (key,), inner)
    else:
        table[path[-1]] = value


def _locate(path: KeyPath, value: Any, locations: dict[KeyPath, Location]) -> None:
    locations[path] = (COMMAND_LINE, None)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        _locate((*path, key), inner, locations)
