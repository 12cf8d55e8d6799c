"""From command-line arguments to a checked document, before torch is imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from titan_rl.config.overrides import apply_overrides
from titan_rl.config.schema import check
from titan_rl.config.toml import Document, load_document
from titan_rl.errors import ConfigError

TRAINERS = ("rl", "supervised", "preference", "reward_model")
"""Values of the root key ``trainer``; ``rl`` when it is absent."""


def read_checked(path: str, overrides: Sequence[str]) -> tuple[Document, str]:
    """Read a TOML file and command-line overrides, and check them against the shipped schema.

    Args:
        path: The TOML file.
        overrides: ``--section.key value`` arguments.

    Returns:
        The document without its root key ``trainer``, and that key's value.

    Raises:
        ConfigError: with file, line, key, value and remedy; all faults together.
    """
    document = apply_overrides(load_document(path), overrides)
    trainer = document.table.pop("trainer", "rl")
    if trainer not in TRAINERS:
        raise ConfigError(
            f"{document.file}: trainer",
            f"be one of {', '.join(TRAINERS)}",
            trainer,
            "Leave it out for reinforcement learning.",
        )
    check(document.table, load_schema(trainer), document)
    return document, trainer


def load_schema(trainer: str) -> dict[str, Any]:
    """The JSON Schema of a trainer's TOML files, as shipped with the package."""
    text = resources.files("titan_rl").joinpath("schemas", f"{trainer}.json").read_text(encoding="utf-8")
    return json.loads(text)
