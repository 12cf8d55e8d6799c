"""TOML files as nested tables that remember where each key stands.

Reading, inheritance (``base = "other.toml"``) and merging live here. What the keys mean does not: see
:mod:`titan_rl.config.schema` and :mod:`titan_rl.config.overlay`. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from titan_rl.config.locations import KeyPath, Location, ManyConfigError, show_where
from titan_rl.config.scanner import scan_lines
from titan_rl.errors import ConfigError

COMMAND_LINE = "command line"
"""What stands where a file name would, for keys that were given on the command line."""


@dataclass(frozen=True, slots=True)
class Document:
    """A nested table and the location of its keys.

    Attributes:
        table: The values, as ``tomli`` reads them.
        file: The file, as the user wrote it, or ``"command line"``.
        locations: Location of every key path that was written down.
    """

    table: dict[str, Any]
    file: str
    locations: Mapping[KeyPath, Location] = field(default_factory=dict)

    def locate(self, path: Sequence[str | int]) -> Location:
        """Return file and line of a key path, or of the nearest section around it."""
        key = tuple(path)
        for length in range(len(key), 0, -1):
            if key[:length] in self.locations:
                return self.locations[key[:length]]
        return self.file, None

    def located(self, error: ConfigError) -> ConfigError:
        """Return an error about one of this document's keys with its file and line; any other as it is."""
        path = tuple(error.where.split("."))
        if path[:1] not in self.locations or isinstance(error, ManyConfigError):
            return error
        where = show_where(path, self.locate)
        return ConfigError(where, error.constraint, error.got, error.remedy)


def load_document(path: str | Path) -> Document:
    """Read a TOML file, and the file that it inherits from.

    ``base = "other.toml"`` (relative to this file) is read first and this file is merged over it; see
    :func:`merge_documents`. A base has no base of its own, so that one file more shows everything.

    Args:
        path: The TOML file.

    Returns:
        The merged document, without the key ``base``.

    Raises:
        ConfigError: A file is missing, not UTF-8 or not TOML, or the base is not a path or has a base itself.
    """
    document = _read(Path(path), shown=str(path), wanted_by=None)
    if "base" not in document.table:
        return document
    where = show_where(("base",), document.locate)
    name = document.table["base"]
    if not isinstance(name, str):
        raise ConfigError(where, "be the path of a TOML file", name, 'Write base = "other.toml".')
    base_path = Path(path).parent / name
    base = _read(base_path, shown=str(base_path), wanted_by=where)
    if "base" in base.table:
        remedy = f"Inheritance goes one level deep: merge {base.table['base']} into {base_path}."
        raise ConfigError(where, "name a file without a base of its own", name, remedy)
    del document.table["base"]
    return merge_documents(base, document)


def merge_documents(lower: Document, upper: Document) -> Document:
    """Merge two documents; where both have a key, ``upper`` wins.

    - Tables merge key by key; every other value, arrays too, is replaced.
    - ``section = false`` removes a table or an array of tables of ``lower``.
    - A table with another ``type`` than the one below starts afresh: the keys below belong to another class.
    - A table with integer keys (only the command line makes one) changes single elements of an array.

    Args:
        lower: The document that is inherited from.
        upper: The document on top.

    Returns:
        A new document; its ``file`` is the one of ``upper`` unless that is the command line.

    Raises:
        ConfigError: ``upper`` changes an element of an array that has no such element.
    """
    table = _merge(lower.table, upper.table, (), upper)
    locations = {
        path: location
        for path, location in {**lower.locations, **upper.locations}.items()
        if _contains(table, path)
    }
    return Document(table, lower.file if upper.file == COMMAND_LINE else upper.file, locations)


def _merge(
    lower: Mapping[str, Any], upper: Mapping[Any, Any], path: KeyPath, source: Document
) -> dict[str, Any]:
    merged = dict(lower)
    for key, value in upper.items():
        below = lower.get(key)
        here = (*path, key)
        if value is False and _is_section(below):
            del merged[key]
        elif isinstance(value, dict) and _has_indices(value):
            merged[key] = _merge_elements(below, value, here, source)
        elif isinstance(value, dict):
            starts_afresh = not isinstance(below, dict) or _changes_type(below, value)
            merged[key] = _merge({} if starts_afresh else below, value, here, source)
        else:
            merged[key] = value
    return merged


def _merge_elements(below: Any, changes: Mapping[int, Any], path: KeyPath, source: Document) -> list[Any]:
    elements = list(below) if isinstance(below, list) else []
    for index in sorted(changes):
        here = (*path, index)
        if index > len(elements):
            remedy = f"Number the elements from 0 on; there are {len(elements)}."
            where = show_where(here, source.locate)
            raise ConfigError(where, "be an element that exists or the next one", index, remedy)
        if index == len(elements):
            elements.append(None)
        elements[index] = _merge({"": elements[index]}, {"": changes[index]}, here[:-1], source).get("")
    return [element for element in elements if element is not None]


def _contains(value: Any, path: KeyPath) -> bool:
    for part in path:
        is_key = isinstance(value, dict) and part in value
        if not is_key and not (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            return False
        value = value[part]
    return True


def _is_section(value: Any) -> bool:
    is_tables = isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
    return isinstance(value, dict) or is_tables


def _has_indices(value: dict[Any, Any]) -> bool:
    return bool(value) and all(isinstance(key, int) for key in value)


def _changes_type(lower: dict[str, Any], upper: dict[str, Any]) -> bool:
    return "type" in lower and "type" in upper and lower["type"] != upper["type"]


def _read(path: Path, *, shown: str, wanted_by: str | None) -> Document:
    where = wanted_by or "the configuration file"
    try:
        data = path.read_bytes()
    except OSError as error:
        remedy = f"{error.strerror}. Check the path (the working directory is {Path.cwd()})."
        raise ConfigError(where, "be a file that can be read", shown, remedy) from error
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        got = f"the byte {data[error.start : error.start + 1]!r}"
        raise ConfigError(f"{shown}:{line}", "be UTF-8 text", got, "Save the file as UTF-8.") from error
    try:
        table = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        line = min(error.lineno, text.count("\n") + 1)
        lines = [*text.split("\n"), ""]
        got = f"the line {lines[line - 1].strip()!r}"
        remedy = f"{error.msg} (column {error.colno})."
        raise ConfigError(f"{shown}:{line}", "be valid TOML", got, remedy) from error
    locations: dict[KeyPath, Location] = {key: (shown, line) for key, line in scan_lines(text).items()}
    return Document(table, shown, locations)
