"""Values against JSON Schema, with errors in the words of this project.

Both the check of a whole file (before torch is imported) and the overlay of single values go through here,
so that the same mistake gets the same message. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jsonschema import (  # pyrefly: ignore[untyped-import]  # it has no stubs
    Draft202012Validator,
    ValidationError,
    validators,
)

from titan_rl.config.locations import KeyPath, Locate, show_path, show_where
from titan_rl.config.registry import alternatives, nearest, suggest, unknown_name
from titan_rl.config.writer import inline
from titan_rl.errors import ConfigError

Schema = dict[str, Any]

ONLY_IN_FILES = "x-only-in-files"
"""Marks what an editor must accept in a file but what must be gone after merging: ``section = false``."""

CUSTOM_TYPE: Schema = {"type": "string", "pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"}
"""A user's own class as ``type``."""

_TYPES = {
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "array": "an array",
    "object": "a table",
}
_BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "multipleOf": "a multiple of",
}
_ENDS = {"min": "at least", "max": "at most"}
_LENGTHS = {f"{end}{unit}": word for unit in ("Length", "Items", "Properties") for end, word in _ENDS.items()}
_PLURALS = {"boolean": "booleans", "integer": "integers", "number": "numbers", "string": "strings"}


def find_errors(value: Any, schema: Schema, *, path: KeyPath, locate: Locate | None) -> list[ConfigError]:
    """Compare a value with a schema.

    Args:
        value: What ``tomli`` read.
        schema: Made by :mod:`titan_rl.config.schema`; a few shapes are expected, not all of JSON Schema.
        path: Key path of ``value``.
        locate: Gives the location of a key path.

    Returns:
        The errors in the order of their lines and keys, none when the value fits.
    """
    found: dict[tuple[Any, ...], ConfigError] = {}
    for error in _Validator(schema).iter_errors(value):
        for leaf in _leaves(error):
            for key_path, config_error in _describe(leaf, path, locate):
                line = locate(key_path)[1] if locate is not None else None
                # A value can break several bounds at once; that is one mistake with one text.
                found[line or 0, tuple(str(part) for part in key_path), str(config_error)] = config_error
    return [found[key] for key in sorted(found)]


def unknown_key(
    path: KeyPath, value: Any, *, known: Sequence[str], locate: Locate | None, type_name: str | None = None
) -> ConfigError:
    """Return the error for a key that its section does not have.

    Args:
        path: The whole path of the key.
        value: Its value.
        known: The keys of the section.
        locate: Gives the location of a key path.
        type_name: The ``type`` of the section, where it has one.
    """
    section = f"a key of [{show_path(path[:-1])}]" if path[:-1] else "a known section or key"
    section += f' of type "{type_name}"' if type_name else ""
    keys = ", ".join(known)
    remedy = suggest(path[-1], known, otherwise=f"The keys are {keys}." if keys else "It has no keys.")
    return ConfigError(show_where(path, locate), f"be {section}", value, remedy)


def missing_key(path: KeyPath, *, locate: Locate | None) -> ConfigError:
    """Return the error for a required key that is not there."""
    section = f"[{show_path(path[:-1])}]" if path[:-1] else "the file"
    return ConfigError(
        show_where(path, locate), "be given", "no value", f"Add {path[-1]} = ... to {section}."
    )


def hidden_key(path: KeyPath, value: Any, *, remedy: str, locate: Locate | None) -> ConfigError:
    """Return the error for a key that exists but is not the user's to set."""
    return ConfigError(show_where(path, locate), "be left out", value, remedy)


def phrase(schema: Schema) -> str:
    """Say what a schema accepts.

    >>> phrase({"type": "integer", "minimum": 1})
    'an integer >= 1'
    >>> phrase({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}, {"const": "none"}]})
    'a number > 0 and <= 1 or "none"'
    """
    if "const" in schema:
        return inline(schema["const"])
    if "enum" in schema:
        return alternatives(schema["enum"])
    if "anyOf" in schema:
        kept = [phrase(option) for option in schema["anyOf"] if ONLY_IN_FILES not in option]
        return " or ".join(dict.fromkeys(kept))
    kind = schema.get("type", "object" if "oneOf" in schema else [])
    said = " or ".join(_TYPES[name] for name in ([kind] if isinstance(kind, str) else kind)) or "a value"
    bounds = [f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join(filter(None, [said + _elements(schema), " and ".join(bounds), _length(schema)]))


def _elements(schema: Schema) -> str:
    if "prefixItems" in schema:
        return f" of {len(schema['prefixItems'])} ({', '.join(map(phrase, schema['prefixItems']))})"
    items, values = schema.get("items"), schema.get("additionalProperties")
    if items and _accepted(items) == {"object"}:
        return " of tables"
    if items:
        plural = _PLURALS.get(items.get("type", "")) if len(items) == 1 else None
        return f" of {plural}" if plural else f" whose elements are each {phrase(items)}"
    return f" whose values are each {phrase(values)}" if values else ""


def _length(schema: Schema) -> str:
    lengths = [f"{word} {schema[key]}" for key, word in _LENGTHS.items() if key in schema]
    if not lengths or "prefixItems" in schema:
        return ""
    unit = {"string": "character", "array": "element"}.get(schema["type"], "key")
    return f"with {' and '.join(lengths)} {unit}(s)"


def _is_number(_checker: Any, value: Any) -> bool:
    # NaN passes every bound, and no option of ours means anything when it is NaN.
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _is_integer(_checker: Any, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _only_in_files(*_: Any) -> Iterator[ValidationError]:
    yield ValidationError("only an inherited section can be removed")


_Validator = validators.extend(
    Draft202012Validator,
    validators={ONLY_IN_FILES: _only_in_files},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"number": _is_number, "integer": _is_integer}
    ),
)


# jsonschema types the attributes of its errors as "maybe unset"; after validation they are set.
_Error = Any


def _leaves(error: _Error) -> Iterator[_Error]:
    """Follow ``anyOf`` and ``oneOf`` to the errors of the branch that was meant."""
    if error.validator not in ("anyOf", "oneOf"):
        yield error
        return
    branches: dict[int, list[_Error]] = {}
    for inner in error.context:
        branches.setdefault(inner.schema_path[0], []).append(inner)
    if error.validator == "oneOf":
        meant = [index for index in branches if _is_branch(error.validator_value[index], error.instance)]
    else:
        meant = [index for index, errors in branches.items() if not all(map(_is_other_kind, errors))]
    if len(meant) == 1:
        for inner in branches[meant[0]]:
            yield from _leaves(inner)
    else:
        yield error


def _is_other_kind(error: _Error) -> bool:
    """Whether a branch fails because the value is of another kind, so that another branch was meant."""
    if error.path:
        return False
    is_no_table = error.validator == "oneOf" and not isinstance(error.instance, Mapping)
    return is_no_table or error.validator in ("type", "const", "enum", ONLY_IN_FILES)


def _is_branch(schema: Schema, instance: Any) -> bool:
    if not isinstance(instance, Mapping):
        return False
    if "type" not in instance:
        return "type" not in schema.get("required", ())
    return schema["properties"]["type"].get("const") == instance["type"]


def _describe(error: _Error, path: KeyPath, locate: Locate | None) -> Iterator[tuple[KeyPath, ConfigError]]:
    here: KeyPath = (*path, *error.absolute_path)
    schema, value = error.schema, error.instance
    if error.validator == "additionalProperties":
        properties = schema["properties"]
        known = [
            key for key, inner in properties.items() if "not" not in inner and ONLY_IN_FILES not in inner
        ]
        name = properties.get("type", {}).get("const")
        for key in value:
            if key not in properties:
                at = (*here, key)
                yield at, unknown_key(at, value[key], known=known, locate=locate, type_name=name)
    elif error.validator == "required":
        for key in error.validator_value:
            if key not in value:
                yield (*here, key), missing_key((*here, key), locate=locate)
    elif error.validator in ("not", ONLY_IN_FILES):
        yield here, hidden_key(here, value, remedy=schema["description"], locate=locate)
    elif error.validator == "oneOf" and isinstance(value, Mapping):
        at = (*here, "type")
        if "type" in value:
            names = [branch["properties"]["type"].get("const") for branch in schema["oneOf"]]
            registered = [name for name in names if name is not None]
            yield at, unknown_name(value["type"], registered, show_where(at, locate))
        else:
            yield at, missing_key(at, locate=locate)
    else:
        where = show_where(here, locate)
        remedy = _remedy(error, schema, value, name=here[-1] if here else "key")
        yield here, ConfigError(where, f"be {phrase(schema)}", value, remedy)


def _remedy(error: _Error, schema: Schema, value: Any, *, name: str | int) -> str:
    accepted = _accepted(schema)
    if value is False and "object" in accepted:
        return "Only an inherited section can be removed with false: leave this out."
    items = [option["items"] for option in schema.get("anyOf", [schema]) if "items" in option]
    if any(_accepted(item) == {"object"} for item in items):
        return f"Write it as [[{name}]]."
    if isinstance(value, str):
        best = nearest(value, [option for option in schema.get("enum", []) if isinstance(option, str)])
        if best is not None:
            return f"Did you mean {best!r}?"
        if "boolean" in accepted and value.lower() in ("true", "false"):
            return f"Write {value.lower()} without quotes."
        if accepted & {"integer", "number"} and _reads_as_number(value):
            return "Remove the quotes."
    if "object" in accepted:
        return "Write a section with its keys."
    if "array" in accepted and not isinstance(value, list | dict):
        return f"Put it into brackets: [{inline(value)}]."
    if accepted == {"string"} and isinstance(value, bool | int | float):
        return f"Put it into quotes: {inline(inline(value))}."
    default = _default(error)
    return "Change it." if default is None else f"The default is {inline(default)}."


def _accepted(schema: Schema) -> set[str]:
    if "oneOf" in schema:
        return {"object"}
    kind = schema.get("type", [])
    inner = [option for option in schema.get("anyOf", []) if ONLY_IN_FILES not in option]
    return {kind} if isinstance(kind, str) else set(kind).union(*map(_accepted, inner))


def _reads_as_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


def _default(error: _Error) -> Any:
    at = error
    while at is not None:
        if "default" in at.schema:
            return at.schema["default"]
        at = at.parent if not at.relative_path else None
    return None
