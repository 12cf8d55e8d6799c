"""``torchrun ... -m titan_rl.train CONFIG.toml [--section.key value ...]``: one training run.

Nothing here imports torch before the configuration is checked.
"""

from __future__ import annotations

import logging
import sys

from titan_rl.trainers.command import start


def main(arguments: list[str] | None = None) -> int:
    """Run, and return the exit code: 0 only when the run did what was asked.

    Args:
        arguments: Without the program's name; the process's own by default.
    """
    return start(arguments, module="titan_rl.train")


if __name__ == "__main__":
    logging.captureWarnings(True)
    sys.exit(main())
