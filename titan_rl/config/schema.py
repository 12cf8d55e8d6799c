"""JSON Schema of a configuration: made from the dataclasses, and used without them.

:func:`make_schema` imports every registered class (and so torch); the result is shipped as a file.
:func:`check` needs that file only: it runs before torch is imported. Editors use the same file for
completion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from titan_rl.config.choice import Choice, owner_of
from titan_rl.config.kinds import (
    MISSING,
    Array,
    Field,
    Pick,
    Section,
    current,
    describe_fields,
    describe_type,
    section_type,
    walk,
)
from titan_rl.config.leaf import NONE, Leaf
from titan_rl.config.locations import raise_all
from titan_rl.config.presets import unknown_presets, with_chosen_types
from titan_rl.config.rules import As, Hidden, Rules
from titan_rl.config.toml import Document
from titan_rl.config.validation import CUSTOM_TYPE, ONLY_IN_FILES, Schema, find_errors

_BASE: Schema = {
    "type": "string",
    ONLY_IN_FILES: True,
    "description": "A TOML file to inherit from, relative to this one. It has no base itself.",
}
_REMOVED: Schema = {"const": False, ONLY_IN_FILES: True, "description": "Removes the inherited section."}


def make_schema(default: Any, rules: Rules | None = None) -> Schema:
    """Return the JSON Schema (draft 2020-12) of the TOML files that :func:`overlay` accepts over ``default``.

    Descriptions are the docstrings that follow the fields in the source.

    Args:
        default: The dataclass instance with the defaults.
        rules: Adaptations of dataclasses that are not ours.

    Raises:
        TypeError: A field can neither be written in TOML nor has a rule.
    """
    schema = _section(type(default), default, rules or {})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "properties": {"base": _BASE, **schema["properties"]},
    }


def check(table: Mapping[str, Any], schema: Schema, document: Document) -> None:
    """Check a merged table against a schema, without torch and without the dataclasses.

    A table without ``type`` is of the type that a preset gives it (:mod:`titan_rl.config.presets`).

    Args:
        table: ``document.table``, or a part of it that starts at the root.
        schema: From :func:`make_schema`.
        document: Gives the file and line of each key.

    Raises:
        ConfigError: Something is unknown, missing, of a wrong type or out of bounds. All errors are reported
            together, in the order of the lines.
    """
    unknown = unknown_presets(table, schema, document.locate)
    chosen = with_chosen_types(table, schema)
    raise_all([*unknown, *find_errors(chosen, schema, path=(), locate=document.locate)])


def _section(config_type: type, instance: Any, rules: Rules, *, type_schema: Schema | None = None) -> Schema:
    fields = walk(config_type, rules)
    docs = describe_fields(config_type)
    properties: Schema = {} if type_schema is None else {"type": type_schema}
    for name, field in fields.items():
        described = {"description": docs[name]} if name in docs else {}
        properties[name] = {**described, **_field(field, instance, rules)}
    required = [name for name, field in fields.items() if instance is None and field.is_required]
    return {
        **({"description": doc} if (doc := describe_type(config_type)) else {}),
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
        "additionalProperties": False,
    }


def _field(field: Field, instance: Any, rules: Rules) -> Schema:
    kind, now = field.kind, current(instance, field)
    if isinstance(kind, Hidden):
        return {"not": {}, "description": kind.remedy}
    if isinstance(kind, Leaf):
        return {**kind.schema, **({} if now is MISSING else _default(kind.write(now)))}
    value = None if now is MISSING else now
    if isinstance(kind, Array):
        return {"anyOf": [{**kind.lengths, "items": _part(kind.item, None, rules)}, _REMOVED]}
    if isinstance(kind, As):
        owned = None if value is None else kind.to_owned(value)
        part = _section(kind.owned_type, owned, rules)
    else:
        part = _part(kind, value, rules)
    off = [{"const": NONE}] if isinstance(kind, Section | Pick) and kind.is_optional else []
    is_off = now is None and (off or isinstance(kind, Pick))
    return {"anyOf": [part, *off, _REMOVED], **({"default": NONE} if is_off and off else {})}


def _part(kind: Section | Pick, value: Any, rules: Rules) -> Schema:
    if isinstance(kind, Pick):
        return _pick(kind.choice, value, rules)
    return _section(section_type(kind, value), value, rules)


def _pick(choice: Choice, value: Any, rules: Rules) -> Schema:
    held = None if value is None else choice.name_of(value)
    default = choice.default if held is None else held
    branches: list[Schema] = []
    for name in dict.fromkeys([*choice.registry, *([held] if held else [])]):
        config_type = choice.config_type(name, name)
        type_schema: Schema = {"const": name}
        if config_type is None:
            branch: Schema = {
                "type": "object",
                "properties": {"type": type_schema},
                "additionalProperties": False,
            }
        else:
            instance = value if type(value) is config_type else None
            branch = _section(config_type, instance, rules, type_schema=type_schema)
            doc = describe_type(owner_of(config_type)) or branch.get("description")
            branch |= {"description": doc} if doc else {}
        if name == default:
            type_schema["default"] = name
        else:
            branch["required"] = ["type", *branch.get("required", [])]
        branches.append(branch)
    custom = {
        "description": "A class of your own. Its keys are checked when it is imported.",
        "type": "object",
        "properties": {"type": {**CUSTOM_TYPE, "not": {"enum": [*choice.registry]}}},
        "required": ["type"],
    }
    return {"oneOf": [*branches, custom]}


def _default(written: Any) -> Schema:
    # JSON has no infinity.
    is_finite = not isinstance(written, float) or math.isfinite(written)
    return {"default": written if is_finite else str(written)}
