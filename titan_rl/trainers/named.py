"""Configurations by name, for TorchTitan's own command line.

``torchrun -m torchtitan.train --module titan_rl --config NAME`` makes the whole configuration first and then
lets tyro change single values. tyro knows types but no bounds, so the values are checked again when the
trainer is built. The names are in :mod:`titan_rl.config_registry`.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.config.dump import to_table, to_toml
from titan_rl.config.entry import load_schema, read_checked
from titan_rl.config.locations import raise_all
from titan_rl.config.recipes import recipe_path
from titan_rl.config.schema import check
from titan_rl.config.toml import Document
from titan_rl.config.validation import find_errors
from titan_rl.errors import ConfigError
from titan_rl.resilience.lock import FolderLock
from titan_rl.trainers import earlier_start
from titan_rl.trainers.configuration import RULES, configure
from titan_rl.trainers.preference import PreferenceTrainer
from titan_rl.trainers.resilient import ResilientTrainer
from titan_rl.trainers.reward_model import RewardModelTrainer
from titan_rl.trainers.rl import RLTrainer
from titan_rl.trainers.session import write_config
from titan_rl.trainers.supervised import SupervisedTrainer


class _ByName(ResilientTrainer):
    """Stands before a trainer of ours, for a configuration that came by name."""

    def __init__(self, config: Any) -> None:
        """Check what the command line changed, build, and write the configuration.

        Raises:
            ConfigError: a value is out of bounds, or the configuration contradicts itself.
        """
        text = _checked(config, self.kind)
        super().__init__(config)
        _write(config, text)


class NamedRLTrainer(_ByName, RLTrainer):
    """The RL trainer, for a configuration that came by name."""

    @dataclass(kw_only=True, slots=True)
    class Config(RLTrainer.Config):
        """The keys of an RL run."""

    def __init__(self, config: Config) -> None:
        """Refuse a validation as well.

        Raises:
            ConfigError: a value is out of bounds, or the configuration contradicts itself.
        """
        if config.validator.enable:
            raise ConfigError(
                "validator.enable",
                "be false in RL, which has no loss to validate",
                True,
                "Set --evaluation.*.",
            )
        super().__init__(config)


class NamedSupervisedTrainer(_ByName, SupervisedTrainer):
    """The supervised trainer, for a configuration that came by name."""

    @dataclass(kw_only=True, slots=True)
    class Config(SupervisedTrainer.Config):
        """The keys of a supervised run."""


class NamedPreferenceTrainer(_ByName, PreferenceTrainer):
    """The preference trainer, for a configuration that came by name."""

    @dataclass(kw_only=True, slots=True)
    class Config(PreferenceTrainer.Config):
        """The keys of a preference run."""


class NamedRewardModelTrainer(_ByName, RewardModelTrainer):
    """The reward-model trainer, for a configuration that came by name."""

    @dataclass(kw_only=True, slots=True)
    class Config(RewardModelTrainer.Config):
        """The keys of a reward-model run."""


_NAMED = {
    "rl": NamedRLTrainer.Config,
    "supervised": NamedSupervisedTrainer.Config,
    "preference": NamedPreferenceTrainer.Config,
    "reward_model": NamedRewardModelTrainer.Config,
}


def from_recipe(name: str) -> Any:
    """The configuration of a shipped recipe.

    Args:
        name: File name without ``.toml``.

    Raises:
        ConfigError: the recipe, or a file that it names, does not exist.
    """
    document, trainer = read_checked(str(recipe_path(name)), [])
    return _named(configure(document, trainer), trainer)


def from_table(table: Mapping[str, Any], *, name: str) -> Any:
    """The configuration of an RL run that is written in Python.

    Args:
        table: Sections and their keys, as in a TOML file.
        name: What errors call it.

    Raises:
        ConfigError: a key or value does not fit.
    """
    document = Document(dict(table), name)
    check(document.table, load_schema("rl"), document)
    return _named(configure(document, "rl"), "rl")


def check_values(config: Any, trainer: str) -> None:
    """Check every value of a configuration against the shipped schema.

    Args:
        config: The whole configuration.
        trainer: The root key ``trainer``.

    Raises:
        ConfigError: something is of a wrong type or out of bounds; all faults together.
    """
    raise_all(find_errors(to_table(config, RULES), load_schema(trainer), path=(), locate=None))


def _checked(config: Any, trainer: str) -> str:
    """Check what the command line changed; returns the configuration as it is written."""
    check_values(config, trainer)
    text = to_toml(config, RULES)
    if os.environ.get("RANK", "0") == "0":
        atexit.register(FolderLock(Path(config.dump_folder)).release)
    earlier_start.refuse_overwriting(config, text)
    earlier_start.check_changes(config, text)
    return text


def _write(config: Any, text: str) -> None:
    """Write the configuration once the trainer is built, which refuses what does not continue a run."""
    if os.environ.get("RANK", "0") == "0":
        write_config(Path(config.dump_folder), text)


def _named(config: Any, trainer: str) -> Any:
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return _NAMED[trainer](**values)
