"""The recipes that ship with the package: the TOML files of ``train_configs/``. No torch."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from titan_rl.config.registry import suggest
from titan_rl.errors import ConfigError

_FOLDER = "train_configs"


def recipe_names() -> list[str]:
    """Names of the shipped recipes, sorted: their files without ``.toml``."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def recipe_path(name: str) -> Path:
    """The file of a shipped recipe.

    Args:
        name: File name without ``.toml``, for example ``tiny_grpo``.

    Raises:
        ConfigError: there is no such recipe.
    """
    names = recipe_names()
    if name not in names:
        remedy = suggest(name, names, otherwise=f"The recipes are {', '.join(names)}.")
        raise ConfigError("The recipe", "be one that ships with titan_rl", name, remedy)
    return _folder() / f"{name}.toml"


def _folder() -> Path:
    """Where the recipes lie: in an installed package, or beside it in a checkout."""
    package = Path(str(resources.files("titan_rl")))
    installed = package / _FOLDER
    # A checkout links the folder into the package; where links are not supported it is a plain file.
    return installed if installed.is_dir() else package.parent / _FOLDER
