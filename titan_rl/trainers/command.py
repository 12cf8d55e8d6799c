"""The command lines that torchrun starts: read and check the configuration, then hand over to a session.

Nothing here imports torch before the configuration is checked.
"""

from __future__ import annotations

import importlib
import os
import sys

from titan_rl.config.entry import read_checked
from titan_rl.errors import ConfigError


def start(arguments: list[str] | None, *, module: str, evaluate_only: bool = False) -> int:
    """Run, and return the exit code: 0 only when the run did what was asked, 2 for the user's input.

    Args:
        arguments: Without the program's name; the process's own by default.
        module: What torchrun starts, for help and remedies.
        evaluate_only: Score held-out prompts instead of training.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: torchrun [...] -m {module} CONFIG.toml [--section.key value ...]")
        print("All keys: docs/configuration_rl.md, and configuration_*.md beside it for the other trainers.")
        return 0 if arguments else 2
    document = None
    try:
        document, trainer = read_checked(arguments[0], arguments[1:])
        if evaluate_only and trainer != "rl":
            raise ConfigError("trainer", "be rl for an evaluation", trainer, "Name the file of an RL run.")
        _check_launch(module)
        # Imported here so that a mistake in the file is reported in a second, without loading torch.
        configuration = importlib.import_module("titan_rl.trainers.configuration")
        config = configuration.configure(document, trainer)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"ConfigError: {error if document is None else document.located(error)}", file=sys.stderr)
        return 2
    session = importlib.import_module("titan_rl.trainers.session")
    return session.run(config, document, evaluate_only=evaluate_only)


def _check_launch(module: str) -> None:
    if "RANK" not in os.environ:
        raise ConfigError(
            "The process",
            "be started by torchrun",
            "no RANK in the environment",
            f"Run `torchrun --standalone --nproc-per-node 1 -m {module} CONFIG.toml`.",
        )
