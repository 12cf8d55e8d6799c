"""Annotations of single values: their JSON Schema, and how TOML's value becomes Python's and back.

A leaf is everything that is not a section: booleans, numbers, strings, enums, paths, lists, tuples, dicts and
unions of these. TOML has no null; the string ``"none"`` stands for None.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import annotated_types

from titan_rl.config.validation import Schema, find_errors

NONE = "none"
"""How TOML writes None."""

_SCALARS: dict[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
_BOUNDS: dict[type, tuple[str, str]] = {
    annotated_types.Ge: ("ge", "minimum"),
    annotated_types.Gt: ("gt", "exclusiveMinimum"),
    annotated_types.Le: ("le", "maximum"),
    annotated_types.Lt: ("lt", "exclusiveMaximum"),
    annotated_types.MultipleOf: ("multiple_of", "multipleOf"),
}
_LENGTHS: dict[type, tuple[str, str]] = {
    annotated_types.MinLen: ("min_length", "min"),
    annotated_types.MaxLen: ("max_length", "max"),
}
_SIZED = {"string": "Length", "array": "Items", "object": "Properties"}


@dataclass(frozen=True, slots=True)
class Leaf:
    """How values of one annotation are checked and converted.

    Attributes:
        schema: JSON Schema of what TOML holds.
        read: Makes the Python value from a TOML value that fits the schema.
        write: The inverse of ``read``.
        holds: Whether a Python value is one that ``write`` accepts.
    """

    schema: Schema
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    holds: Callable[[Any], bool]


def make_leaf(annotation: Any, constraints: Sequence[Any] = ()) -> Leaf:
    """Return the leaf of an annotation.

    Args:
        annotation: A type with its ``Annotated`` metadata.
        constraints: Constraints of ``annotated_types`` from around it; each applies where its kind fits.

    Raises:
        TypeError: The annotation cannot be written in TOML.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return make_leaf(arguments[0], [*flatten_constraints(arguments[1:]), *constraints])
    if origin in (typing.Union, types.UnionType):
        return _union([make_leaf(argument, constraints) for argument in arguments])
    if annotation is None or annotation is type(None):
        return Leaf({"const": NONE}, lambda value: None, lambda value: NONE, lambda value: value is None)
    if annotation in (Any, object):
        return Leaf({}, _same, _same, lambda value: True)
    if annotation in _SCALARS:
        return _scalar(annotation, constraints)
    if origin is Literal:
        return _literal(arguments)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        values = [member.value for member in annotation]
        return Leaf({"enum": values}, annotation, lambda value: value.value, _instance_of(annotation))
    if annotation is Path:
        return Leaf({"type": "string"}, Path, str, _instance_of(Path))
    container = origin or annotation
    if container in (list, Sequence):
        return _array(make_leaf(arguments[0] if arguments else Any), constraints, container=list)
    if container is tuple:
        return _tuple(arguments or (Any, ...), constraints)
    if container in (dict, Mapping):
        return _table(make_leaf(arguments[1] if arguments else Any), constraints)
    raise TypeError(f"{annotation!r} cannot be written in TOML: give the field a rule, for example Hidden()")


def flatten_constraints(metadata: Sequence[Any]) -> list[Any]:
    """Expand groups such as ``Interval(gt=0, le=1)`` and keep what is a constraint of ``annotated_types``.

    Raises:
        TypeError: A constraint has no counterpart in JSON Schema, so it would be ignored silently.
    """
    found: list[Any] = []
    for item in metadata:
        if isinstance(item, annotated_types.GroupedMetadata):
            found += flatten_constraints(list(item))
        elif type(item) in _BOUNDS or type(item) in _LENGTHS:
            found.append(item)
        elif isinstance(item, annotated_types.BaseMetadata):
            raise TypeError(f"{item!r} cannot be expressed in the schema: check it in __post_init__")
    return found


def constrain(schema: Schema, constraints: Sequence[Any]) -> Schema:
    """Return the schema of one kind of value with the constraints that apply to that kind."""
    kind = schema.get("type")
    added: Schema = {}
    for item in constraints:
        if type(item) in _BOUNDS and kind in ("integer", "number"):
            attribute, key = _BOUNDS[type(item)]
            added[key] = getattr(item, attribute)
        if type(item) in _LENGTHS and kind in _SIZED:
            attribute, key = _LENGTHS[type(item)]
            added[key + _SIZED[kind]] = getattr(item, attribute)
    return {**schema, **added}


def _same(value: Any) -> Any:
    return value


def _instance_of(expected: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, expected)


def _scalar(kind: type, constraints: Sequence[Any]) -> Leaf:
    schema = constrain({"type": _SCALARS[kind]}, constraints)
    accepted = (int, float) if kind is float else kind

    def holds(value: Any) -> bool:
        return isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))

    return Leaf(schema, float if kind is float else _same, _same, holds)


def _literal(values: tuple[Any, ...]) -> Leaf:
    written = [NONE if value is None else value for value in values]

    def write(value: Any) -> Any:
        return written[values.index(value)]

    return Leaf(
        {"enum": written}, lambda value: values[written.index(value)], write, lambda value: value in values
    )


def _array(item: Leaf, constraints: Sequence[Any], *, container: type) -> Leaf:
    def holds(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(map(item.holds, value))

    return Leaf(
        constrain({"type": "array", "items": item.schema}, constraints),
        lambda value: container(item.read(element) for element in value),
        lambda value: [item.write(element) for element in value],
        holds,
    )


def _tuple(arguments: tuple[Any, ...], constraints: Sequence[Any]) -> Leaf:
    if len(arguments) == 2 and arguments[1] is ...:
        return _array(make_leaf(arguments[0]), constraints, container=tuple)
    items = [make_leaf(argument) for argument in arguments]
    length = len(items)

    def holds(value: Any) -> bool:
        pairs = zip(items, value, strict=False) if isinstance(value, list | tuple) else ()
        return isinstance(value, list | tuple) and len(value) == length and all(i.holds(v) for i, v in pairs)

    return Leaf(
        {
            "type": "array",
            "prefixItems": [item.schema for item in items],
            "minItems": length,
            "maxItems": length,
        },
        lambda value: tuple(item.read(element) for item, element in zip(items, value, strict=True)),
        lambda value: [item.write(element) for item, element in zip(items, value, strict=True)],
        holds,
    )


def _table(item: Leaf, constraints: Sequence[Any]) -> Leaf:
    schema: Schema = {"type": "object"}
    if item.schema:
        schema["additionalProperties"] = item.schema
    return Leaf(
        constrain(schema, constraints),
        lambda value: {key: item.read(element) for key, element in value.items()},
        lambda value: {key: item.write(element) for key, element in value.items()},
        lambda value: isinstance(value, dict) and all(map(item.holds, value.values())),
    )


def _union(members: list[Leaf]) -> Leaf:
    # "none" is None even where strings are allowed, and 1 stays an integer in ``float | int``.
    order = [{"const": NONE}, "boolean", "integer", "number"]

    def rank(member: Leaf) -> int:
        key = member.schema if member.schema == order[0] else member.schema.get("type")
        return order.index(key) if key in order else len(order)

    members = sorted(members, key=rank)

    def pick(value: Any) -> Leaf:
        return next(m for m in members if not find_errors(value, m.schema, path=(), locate=None))

    def write(value: Any) -> Any:
        return next(member for member in members if member.holds(value)).write(value)

    return Leaf(
        _union_schema([member.schema for member in members]),
        lambda value: pick(value).read(value),
        write,
        lambda value: any(member.holds(value) for member in members),
    )


def _union_schema(schemas: list[Schema]) -> Schema:
    schemas = [schema for i, schema in enumerate(schemas) if schema not in schemas[:i]]
    none = {"const": NONE}
    rest = [schema for schema in schemas if schema != none]
    if none in schemas and len(rest) == 1 and rest[0].keys() == {"enum"}:
        return {"enum": [*rest[0]["enum"], NONE]}
    if len(rest) == len(schemas) and all(schema.keys() == {"type"} for schema in rest):
        names = [schema["type"] for schema in rest]
        names = [name for name in names if not (name == "integer" and "number" in names)]
        return {"type": names[0] if len(names) == 1 else names}
    return {"anyOf": [*rest, none] if none in schemas else rest}
