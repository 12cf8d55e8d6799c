"""What the fields of a dataclass are in TOML: the one walk that overlay, schema and dump share.

A field is a leaf (one value), a section (another dataclass), a choice of class, an array of sections or
choices, another dataclass by rule, or hidden by rule. Annotations are evaluated here and nowhere else.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.config.choice import Choice
from titan_rl.config.leaf import Leaf, constrain, flatten_constraints, make_leaf
from titan_rl.config.rules import As, Hidden, Limits, Rules, find_rule
from titan_rl.config.validation import Schema

MISSING = dataclasses.MISSING


@dataclass(frozen=True, slots=True)
class Section:
    """A nested dataclass.

    Attributes:
        type: The dataclass of the annotation; the one of the value counts where there is a value.
        is_optional: Whether None is allowed, which means that the section is off.
    """

    type: type
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Pick:
    """The ``Config`` of a class that ``type`` names."""

    choice: Choice
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Array:
    """An array of sections or choices, ``[[key]]``.

    Attributes:
        item: What each element is.
        container: ``list`` or ``tuple``.
        lengths: ``minItems`` and ``maxItems``.
    """

    item: Section | Pick
    container: type
    lengths: Schema


Kind = Leaf | Section | Pick | Array | As | Hidden


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a dataclass.

    Attributes:
        name: Its name, which is its key.
        kind: What it is in TOML.
        field: The field itself, for its default.
    """

    name: str
    kind: Kind
    field: dataclasses.Field[Any]

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.field.default is MISSING and self.field.default_factory is MISSING

    @property
    def default(self) -> Any:
        """A fresh default, or MISSING when the field is required."""
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()


def walk(config_type: type, rules: Rules) -> dict[str, Field]:
    """Return the fields of a dataclass by name.

    Args:
        config_type: A dataclass.
        rules: Adaptations of dataclasses that are not ours.

    Raises:
        TypeError: A field can neither be written in TOML nor has a rule.
    """
    found: dict[str, Field] = {}
    for field in dataclasses.fields(config_type):
        if field.init and not field.name.startswith("_"):
            found[field.name] = Field(field.name, _kind(config_type, field.name, rules), field)
    return found


def current(instance: Any, field: Field) -> Any:
    """Return the value of a field in an instance, or its default when there is no instance."""
    return field.default if instance is None else getattr(instance, field.name)


def section_type(kind: Section, value: Any) -> type:
    """Return the dataclass of a section: of its value, else of its annotation."""
    return kind.type if value is None or value is MISSING else type(value)


@functools.cache
def describe_fields(config_type: type) -> dict[str, str]:
    """Return the docstring that follows each field in the source, by field name; bases included."""
    found: dict[str, str] = {}
    for base in reversed(config_type.__mro__):
        found |= _module_docs(base.__module__).get(base.__qualname__, {})
    return found


def describe_type(config_type: type) -> str:
    """Return the first paragraph of what a class says of itself, or the empty string."""
    doc = inspect.cleandoc(config_type.__doc__ or "")
    is_generated = doc.startswith(f"{config_type.__name__}(")  # dataclasses write one where there is none
    return "" if is_generated else " ".join(doc.split("\n\n")[0].split())


def _kind(config_type: type, name: str, rules: Rules) -> Kind:
    rule = find_rule(rules, config_type, name)
    if isinstance(rule, Hidden | As):
        return rule
    if isinstance(rule, Choice):
        return Pick(rule)
    annotation = _annotation(config_type, name)
    try:
        return _classify(annotation, rule.constraints if isinstance(rule, Limits) else ())
    except TypeError as error:
        raise TypeError(f"{config_type.__module__}.{config_type.__qualname__}.{name}: {error}") from error


def _classify(annotation: Any, constraints: Sequence[Any]) -> Kind:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        choice = next((item for item in arguments[1:] if isinstance(item, Choice)), None)
        if choice is not None:
            return Pick(choice, type(None) in typing.get_args(arguments[0]))
        return _classify(arguments[0], [*flatten_constraints(arguments[1:]), *constraints])
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return Section(annotation)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in arguments if option is not type(None)]
        kinds = [_classify(option, constraints) for option in options if _is_section(option)]
        if kinds and len(kinds) == len(options) == 1 and isinstance(kinds[0], Section | Pick):
            return dataclasses.replace(kinds[0], is_optional=True)
        if kinds:
            raise TypeError(f"{annotation!r} mixes several sections: give the field a Choice")
    if origin in (list, tuple, Sequence) and arguments and _is_section(arguments[0]):
        item = _classify(arguments[0], ())
        is_open = origin is not tuple or arguments[1:] == (...,)
        if not isinstance(item, Section | Pick) or not is_open:
            raise TypeError(f"{annotation!r} is not an array of sections of one kind")
        lengths = constrain({"type": "array"}, constraints)
        return Array(item, tuple if origin is tuple else list, lengths)
    return make_leaf(annotation, constraints)


def _is_section(annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Annotated:
        arguments = typing.get_args(annotation)
        return any(isinstance(item, Choice) for item in arguments[1:]) or _is_section(arguments[0])
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


@functools.cache
def _annotation(config_type: type, name: str) -> Any:
    # One field at a time: a hidden field may have an annotation that only type checkers can evaluate.
    for base in config_type.__mro__:
        if name in vars(base).get("__annotations__", {}):
            holder = types.SimpleNamespace(__annotations__={name: base.__annotations__[name]})
            names = vars(sys.modules[base.__module__])
            return typing.get_type_hints(holder, names, dict(vars(base)), include_extras=True)[name]
    raise TypeError(f"{config_type.__qualname__} has no annotation for {name}")


@functools.cache
def _module_docs(module_name: str) -> dict[str, dict[str, str]]:
    try:
        source = inspect.getsource(sys.modules[module_name])
    except (OSError, TypeError, KeyError):
        return {}  # builtins, and classes made at run time, have no source
    found: dict[str, dict[str, str]] = {}
    _collect_docs(ast.parse(source).body, "", found)
    return found


def _collect_docs(body: list[ast.stmt], prefix: str, found: dict[str, dict[str, str]]) -> None:
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            name = f"{prefix}{statement.name}"
            docs = found.setdefault(name, {})
            for field, doc in zip(statement.body, statement.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(doc, ast.Expr)
                    and isinstance(doc.value, ast.Constant)
                    and isinstance(doc.value.value, str)
                ):
                    docs[field.target.id] = inspect.cleandoc(doc.value.value)
            _collect_docs(statement.body, f"{name}.", found)
