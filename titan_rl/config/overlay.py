"""A table laid over the defaults: dataclass instances from what a user wrote.

Nothing is mutated: changed sections are new instances (``dataclasses.replace``), untouched ones are shared
with the defaults. Values of single fields are checked by the same schema that checks a file before torch is
imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from titan_rl.config.choice import Choice
from titan_rl.config.kinds import MISSING, Array, Field, Pick, Section, current, section_type, walk
from titan_rl.config.leaf import NONE, Leaf
from titan_rl.config.locations import KeyPath, Locate, raise_all, show_path, show_where
from titan_rl.config.rules import As, Hidden, Rules
from titan_rl.config.validation import Schema, find_errors, hidden_key, missing_key, unknown_key
from titan_rl.config.writer import inline
from titan_rl.errors import ConfigError

T = TypeVar("T")

MAX_SHOWN = 6
"""Values shown of a section that its dataclass refused as a whole."""

_FAILED = object()
_TABLE: Schema = {"type": "object"}


def overlay(
    default: T,
    table: Mapping[str, Any],
    *,
    rules: Rules | None = None,
    where: str = "",
    locate: Locate | None = None,
) -> T:
    """Return ``default`` with the values of ``table``.

    Sections keep the dataclass that the default holds. A section that is ``X | None = None`` is on when it is
    present, and starts from ``X()``. ``"none"`` stands for None. A choice keeps its class unless ``type``
    names another one, which then starts from its own defaults. Arrays and dicts are replaced as a whole.

    Args:
        default: A dataclass instance.
        table: A nested table, ``Document.table`` for example.
        rules: Adaptations of dataclasses that are not ours.
        where: Dotted path of ``table`` in its document.
        locate: ``Document.locate``; without it errors name keys but no lines.

    Returns:
        A new instance of ``type(default)``.

    Raises:
        ConfigError: Unknown, missing or hidden keys, values of a wrong type or out of bounds, or a dataclass
        that
            refuses its values in ``__post_init__``. All errors are reported together.
        TypeError: A dataclass has a field that TOML cannot express and that no rule adapts.

    >>> @dataclasses.dataclass(kw_only=True, slots=True)
    ... class Training:
    ...     steps: int = 100
    ...     seq_len: int = 2048
    >>> overlay(Training(), {"steps": 5})
    Training(steps=5, seq_len=2048)
    >>> overlay(Training(), {"stps": 5}, where="training")
    Traceback (most recent call last):
    ...
    titan_rl.errors.ConfigError: training.stps must be a key of [training]; got 5. Did you mean 'steps'?
    """
    work = _Overlay(rules or {}, locate)
    path: KeyPath = tuple(where.split(".")) if where else ()
    result = work.section(type(default), default, table, path)
    raise_all(work.errors)
    return result


class _Overlay:
    """One overlay: collects errors; a part that could not be made is ``_FAILED``."""

    def __init__(self, rules: Rules, locate: Locate | None) -> None:
        self.rules = rules
        self.locate = locate
        self.errors: list[ConfigError] = []

    def section(
        self, config_type: type, instance: Any, table: Any, path: KeyPath, type_name: str | None = None
    ) -> Any:
        if not self._fits(table, _TABLE, path):
            return _FAILED
        errors_before = len(self.errors)
        fields = walk(config_type, self.rules)
        changes: dict[str, Any] = {}
        for name, value in table.items():
            if name == "type" and type_name is not None:
                continue
            if name not in fields:
                known = [field.name for field in fields.values() if not isinstance(field.kind, Hidden)]
                known = ["type", *known] if type_name is not None else known
                error = unknown_key(
                    (*path, name), value, known=known, locate=self.locate, type_name=type_name
                )
                self.errors.append(error)
            else:
                changes[name] = self.field(fields[name], instance, value, (*path, name))
        if instance is None:
            required = [field for field in fields.values() if field.is_required]
            absent = [field.name for field in required if field.name not in changes]
            self.errors += [missing_key((*path, name), locate=self.locate) for name in absent]
        if len(self.errors) > errors_before:
            return _FAILED
        return self.construct(config_type, instance, changes, table, path)

    def field(self, field: Field, instance: Any, value: Any, path: KeyPath) -> Any:
        kind, now = field.kind, current(instance, field)
        if isinstance(kind, Hidden):
            self.errors.append(hidden_key(path, value, remedy=kind.remedy, locate=self.locate))
            return _FAILED
        if isinstance(kind, Leaf):
            schema = kind.schema if now is MISSING else kind.schema | {"default": kind.write(now)}
            return kind.read(value) if self._fits(value, schema, path) else _FAILED
        if isinstance(kind, Array):
            return self.array(kind, value, path)
        if isinstance(kind, As):
            return self.shown(kind, now, value, path)
        return self.part(kind, None if now is MISSING else now, value, path)

    def part(self, kind: Section | Pick, now: Any, value: Any, path: KeyPath) -> Any:
        if kind.is_optional and value == NONE:
            return None
        if kind.is_optional and not self._fits(value, {"anyOf": [_TABLE, {"const": NONE}]}, path):
            return _FAILED
        if isinstance(kind, Pick):
            return self.pick(kind.choice, now, value, path)
        return self.section(section_type(kind, now), now, value, path)

    def pick(self, choice: Choice, now: Any, table: Any, path: KeyPath) -> Any:
        if not self._fits(table, _TABLE, path):
            return _FAILED
        where = show_where((*path, "type"), self.locate)
        name = table.get("type", choice.default if now is None else None)
        if name is None and now is None:
            self.errors.append(missing_key((*path, "type"), locate=self.locate))
            return _FAILED
        try:
            config_type = type(now) if name is None else choice.config_type(name, where)
            type_name = choice.name_of(now) if name is None else name
        except ConfigError as error:
            self.errors.append(error)
            return _FAILED
        if config_type is None:
            for key in table.keys() - {"type"}:
                error = unknown_key(
                    (*path, key), table[key], known=["type"], locate=self.locate, type_name=type_name
                )
                self.errors.append(error)
            return None
        instance = now if type(now) is config_type else None
        return self.section(config_type, instance, table, path, type_name)

    def array(self, kind: Array, value: Any, path: KeyPath) -> Any:
        # The elements are checked one by one below, each with its own key.
        schema = {**kind.lengths, "items": _TABLE}
        elements = [{} for _ in value] if isinstance(value, list) else value
        if not self._fits(elements, schema, path):
            return _FAILED
        made = [self.part(kind.item, None, element, (*path, i)) for i, element in enumerate(value)]
        return kind.container(made)

    def shown(self, rule: As, now: Any, value: Any, path: KeyPath) -> Any:
        owned = None if now is None or now is MISSING else rule.to_owned(now)
        made = self.section(rule.owned_type, owned, value, path)
        if made is _FAILED:
            return _FAILED
        try:
            return rule.from_owned(made)
        except (ValueError, AssertionError, ConfigError) as error:
            self.errors.append(self._refusal(error, rule.owned_type, value, path))
            return _FAILED

    def construct(
        self, config_type: type, instance: Any, changes: dict[str, Any], table: Any, path: KeyPath
    ) -> Any:
        try:
            return config_type(**changes) if instance is None else dataclasses.replace(instance, **changes)
        except (ValueError, AssertionError, ConfigError) as error:
            self.errors.append(self._refusal(error, config_type, table, path))
            return _FAILED

    def _refusal(
        self, error: Exception, config_type: type, table: Mapping[str, Any], path: KeyPath
    ) -> ConfigError:
        """Turn what a ``__post_init__`` raised into an error that names the section and its line."""
        if isinstance(error, ConfigError):
            key = error.where.split(".")
            names = {field.name for field in dataclasses.fields(config_type)}
            if key[0] in names:
                where = show_where((*path, *key), self.locate)
            else:
                where = show_where(path, self.locate).removesuffix(show_path(path)) + error.where
            return ConfigError(where, error.constraint, error.got, error.remedy)
        message = str(error).strip().rstrip(".") or type(error).__name__
        given = dict(_flatten(table, ()))
        named = {key: value for key, value in given.items() if str(key[-1]) in message}
        shown = list((named or given).items())[:MAX_SHOWN]
        got = ", ".join(f"{show_path(key)} = {inline(value)}" for key, value in shown) or "its defaults"
        where = show_where((*path, *next(iter(named))) if len(named) == 1 else path, self.locate)
        return ConfigError(where, f"be accepted by {config_type.__qualname__}", got, f"{message}.")

    def _fits(self, value: Any, schema: Schema, path: KeyPath) -> bool:
        errors = find_errors(value, schema, path=path, locate=self.locate)
        self.errors += errors
        return not errors


def _flatten(table: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*path, key))
        else:
            yield (*path, key), value
