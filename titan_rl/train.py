"""``torchrun ... -m titan_rl.train CONFIG.toml [--section.key value ...]``: one training run.

Nothing here imports torch before the configuration is checked.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

from titan_rl.config.entry import read_checked
from titan_rl.errors import ConfigError

USAGE = "usage: torchrun [...] -m titan_rl.train CONFIG.toml [--section.key value ...]"


def main(arguments: list[str] | None = None) -> int:
    """Run, and return the exit code: 0 only when the run did what was asked.

    Args:
        arguments: Without the program's name; the process's own by default.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{USAGE}\nAll keys: docs/configuration.md.")
        return 0 if arguments else 2
    try:
        document, trainer = read_checked(arguments[0], arguments[1:])
        _check_launch()
    except ConfigError as error:
        return _refuse(error)
    return _run(document, trainer)


def _check_launch() -> None:
    if "RANK" not in os.environ:
        raise ConfigError(
            "The process",
            "be started by torchrun",
            "no RANK in the environment",
            "Run `torchrun --standalone --nproc-per-node 1 -m titan_rl.train CONFIG.toml`.",
        )


def _refuse(error: ConfigError) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"ConfigError: {error}", file=sys.stderr)
    return 2


def _run(document: Any, trainer_name: str) -> int:
    """Import torch and TorchTitan, build the trainer and train."""
    # Imported here so that a mistake in the file is reported in a second, without loading torch.
    configuration = importlib.import_module("titan_rl.trainers.configuration")
    session = importlib.import_module("titan_rl.trainers.session")
    try:
        config = configuration.configure(document, trainer_name)
    except ConfigError as error:
        return _refuse(error)
    return session.run(config)


if __name__ == "__main__":
    logging.captureWarnings(True)
    sys.exit(main())
