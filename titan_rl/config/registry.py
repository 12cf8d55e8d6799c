"""From a name in a configuration file to a Python object.

A registry is a literal dict ``name -> "package.module:Class"``; each one lives next to the components that
it names. This module holds the one function that resolves them. Standard library only, so that reward workers
and the command line start fast.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from titan_rl.errors import ConfigError

CUSTOM_PATTERN = r"^[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*$"
"""What a user's own class looks like: ``package.module:Class``."""


def resolve(name: str, registry: Mapping[str, str], where: str) -> Any:
    """Return the object that ``name`` stands for.

    The current working directory is importable, so that a user's ``my_module:MyClass`` needs no installation
    (``torchrun -m`` arranges that by itself, a console script does not).

    Args:
        name: A key of ``registry``, or ``"package.module:Class"``.
        registry: Registered names and the ``"package.module:Class"`` of each.
        where: The configuration key that holds ``name``, for errors.

    Returns:
        The object, usually a class. It is imported now, not before.

    Raises:
        ConfigError: The name is neither registered nor of the form ``package.module:Class``, its module does
            not import, or the module has no such object.

    >>> resolve("decoder", {"decoder": "json:JSONDecoder"}, "reader.type").__name__
    'JSONDecoder'
    >>> resolve("decodr", {"decoder": "json:JSONDecoder"}, "reader.type")
    Traceback (most recent call last):
    ...
    titan_rl.errors.ConfigError: reader.type must be 'decoder' or "package.module:Class"; got 'decodr'. \
Did you mean 'decoder'?
    """
    target = registry.get(name) if isinstance(name, str) else None
    if target is None:
        if not isinstance(name, str) or re.match(CUSTOM_PATTERN, name) is None:
            raise unknown_name(name, registry, where)
        target = name
    module_name, _, qualified_name = target.partition(":")
    try:
        found = _import(module_name)
    except Exception as error:  # a user's module can fail in any way; its own message is what helps
        remedy = f"Importing {module_name} raised {type(error).__name__}: {error}."
        raise ConfigError(where, "name something that can be imported", name, remedy) from error
    for part in qualified_name.split("."):
        if not hasattr(found, part):
            public = [known for known in vars(found) if not known.startswith("_")]
            remedy = suggest(part, public, otherwise=f"Check the name in {_origin(module_name)}.")
            raise ConfigError(where, f"name something that {module_name} defines", name, remedy)
        found = getattr(found, part)
    return found


def unknown_name(name: object, registered: Iterable[str], where: str) -> ConfigError:
    """Return the error for a ``type`` that is neither registered nor of the form ``package.module:Class``."""
    names = list(registered)
    remedy = suggest(name, names, otherwise="Use one of these names, or name your own class.")
    return ConfigError(where, f'be {alternatives(names)} or "package.module:Class"', name, remedy)


def nearest(name: object, candidates: Iterable[str]) -> str | None:
    """Return the candidate that looks most like ``name``, or None when none does.

    >>> nearest("temprature", ["temperature", "top_p"])
    'temperature'
    >>> nearest("x", ["temperature", "top_p"])
    """
    matches = difflib.get_close_matches(str(name), sorted(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None


def suggest(name: object, candidates: Iterable[str], *, otherwise: str) -> str:
    """Return ``Did you mean '...'?`` for the nearest candidate, or ``otherwise`` when none is near."""
    best = nearest(name, candidates)
    return otherwise if best is None else f"Did you mean {best!r}?"


def alternatives(values: Iterable[object]) -> str:
    """List values for "must be ...", as in ``one of 'a', 'b', 'c'``."""
    shown = [repr(value) for value in values]
    if not shown:
        return "a registered name (there are none)"
    return shown[0] if len(shown) == 1 else "one of " + ", ".join(shown)


def _import(module_name: str) -> Any:
    # At the end: the directory of a run must never shadow an installed package.
    directory = os.getcwd()
    if directory not in sys.path and "" not in sys.path:
        sys.path.append(directory)
    return importlib.import_module(module_name)


def _origin(module_name: str) -> str:
    return getattr(sys.modules[module_name], "__file__", None) or module_name
