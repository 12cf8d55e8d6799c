"""Fields whose class is chosen in the file: ``type = "name"`` or ``type = "package.module:Class"``.

A component nests its configuration: ``class Grpo: @dataclass(kw_only=True, slots=True) class Config: ...``.
A field that holds one of several components is annotated ``Annotated[object, Choice(REGISTRY)]`` and holds
the nested ``Config`` instance of the chosen class. :func:`build` makes the component.

How a ``Config`` instance remembers its class: by where it is nested (``Config.__qualname__`` without its last
part), so components need no base class. Two exceptions set ``_owner`` on the ``Config`` class: TorchTitan's
``Configurable``, and a subclass that only inherits its parent's ``Config`` (it gets an empty subclass of it
here).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_rl.config.registry import resolve
from titan_rl.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Annotation (or rule) of a field that holds the ``Config`` of one of several classes.

    Attributes:
        registry: ``name -> "package.module:Class"``; a name that stands for None switches the component off.
        default: The name taken when the table has no ``type`` and the field holds no instance.

    >>> from typing import Annotated
    >>> GENERATORS = {"vllm": "titan_rl.generation.vllm:VLLMGenerator"}
    >>> @dataclass(kw_only=True, slots=True)
    ... class Root:
    ...     generator: Annotated[object, Choice(GENERATORS, default="vllm")] = None
    """

    registry: Mapping[str, str | None]
    default: str | None = None

    @property
    def classes(self) -> dict[str, str]:
        """The names that stand for a class, without those that stand for None."""
        return {name: target for name, target in self.registry.items() if target is not None}

    @property
    def none_name(self) -> str | None:
        """The name that stands for None, if there is one."""
        return next((name for name, target in self.registry.items() if target is None), None)

    def config_type(self, name: str, where: str) -> type | None:
        """Return the ``Config`` dataclass of a class named in a file, or None where the name means that.

        Args:
            name: A registered name, or ``"package.module:Class"``.
            where: The key that holds it, for errors.

        Raises:
            ConfigError: There is no such class, or it nests no dataclass ``Config``.
        """
        if isinstance(name, str) and name in self.registry and self.registry[name] is None:
            return None
        # Names that mean None are offered too when a name is misspelt.
        registry = {known: target or "" for known, target in self.registry.items()}
        owner = resolve(name, registry, where)
        config = getattr(owner, "Config", None)
        if (
            not isinstance(owner, type)
            or not isinstance(config, type)
            or not dataclasses.is_dataclass(config)
        ):
            remedy = "Nest @dataclass(kw_only=True, slots=True) class Config in it, even without fields."
            raise ConfigError(where, "name a class with a nested dataclass Config", name, remedy)
        return _config_of(owner)

    def name_of(self, config: object) -> str:
        """Return the ``type`` that chooses the class of ``config``: a registered name where there is one.

        Args:
            config: The value of the field; None is allowed where a name stands for it.

        Raises:
            TypeError: No class nests this configuration.
        """
        if config is None and self.none_name is not None:
            return self.none_name
        owner = owner_of(type(config))
        target = f"{owner.__module__}:{owner.__qualname__}"
        for name, registered in self.classes.items():
            if registered == target or _imported(registered) is owner:
                return name
        return target


def owner_of(config_type: type) -> type:
    """Return the class that nests this ``Config`` dataclass.

    Args:
        config_type: The dataclass.

    Raises:
        TypeError: It is not nested in a class of an imported module.
    """
    if vars(config_type).get("_owner") is not None:
        return vars(config_type)["_owner"]
    owner = _imported(f"{config_type.__module__}:{config_type.__qualname__.rpartition('.')[0]}")
    if isinstance(owner, type) and getattr(owner, config_type.__name__, None) is config_type:
        return owner
    shown = f"{config_type.__module__}.{config_type.__qualname__}"
    raise TypeError(f"{shown} is not nested in the class that it configures, so nothing can be built from it")


def build(config: Any, /, **kwargs: Any) -> Any:
    """Make the component that ``config`` configures: ``Owner(config, **kwargs)``.

    Args:
        config: The value of a field annotated with :class:`Choice`, or any nested ``Config`` instance.
        kwargs: What the component needs at run time besides its configuration.

    Returns:
        An instance of the class that nests ``type(config)``.

    Raises:
        TypeError: No class nests this configuration.
    """
    return owner_of(type(config))(config, **kwargs)


@functools.cache
def _config_of(owner: type) -> type:
    config: type = vars(owner).get("Config") or owner.Config  # pyrefly: ignore[missing-attribute]
    if "Config" in vars(owner):
        return config
    # Inherited: without a class of its own, building it would make an instance of the parent.
    namespace = {
        "__slots__": (),
        "__module__": owner.__module__,
        "__qualname__": f"{owner.__qualname__}.Config",
        "__doc__": config.__doc__,
        "_owner": owner,
    }
    return type("Config", (config,), namespace)


def _imported(target: str) -> Any:
    """Return the object of ``package.module:Class`` if its module is imported already, else None."""
    module_name, _, qualified_name = target.partition(":")
    found = sys.modules.get(module_name)
    for part in qualified_name.split(".") if found is not None else ():
        found = getattr(found, part, None)
    return found
