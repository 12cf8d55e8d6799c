"""torchrun's own agent with ranks that are forked from a process that has imported everything already.

    python -m titan_rl.launch [options of torchrun] CONFIG.toml [--section.key value ...]

A rank that torchrun starts again imports torch, TorchTitan and vLLM first, which is most of what a recovery
takes (docs/reliability.md). Here a fork server has imported them, holds no process group, touches no device
and runs no thread, and each rank, of the first start and of every restart, is forked from it. Rendezvous,
supervision, signals and exit codes are torchrun's, and so are all options but those that say what is started
and how: ``-m``, ``--no-python`` and ``--run-path`` are refused, ``--start-method`` is always ``forkserver``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record

from titan_rl.config.entry import read_checked
from titan_rl.errors import ConfigError

_PRELOAD = (
    "titan_rl.train",
    "titan_rl.trainers.configuration",
    "titan_rl.trainers.session",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
)
_PRELOAD_VLLM = "titan_rl.generation.vllm_preload"
_SCRIPT = Path(__file__).with_name("train.py")


def launch(arguments: Sequence[str], *, script: Path = _SCRIPT) -> int:
    """Run as torchrun does.

    Args:
        arguments: Without the program's name.
        script: What each rank runs, as ``__main__``.

    Returns:
        0, or 2 for a mistake in the configuration, which is found before anything is started.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed and no restart is
            left.
    """
    options = torchrun.parse_args(list(arguments))
    config, overrides = options.training_script, options.training_script_args
    try:
        _refuse_other_starts(options)
        document, trainer = read_checked(config, overrides)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    is_vllm = trainer == "rl" and document.table.get("generator", {}).get("type", "vllm") == "vllm"
    multiprocessing.set_forkserver_preload([*_PRELOAD, *([_PRELOAD_VLLM] if is_vllm else [])])
    options.run_path, options.start_method = True, "forkserver"
    options.training_script, options.training_script_args = str(script), [config, *overrides]
    torchrun.run(options)
    return 0


def _refuse_other_starts(options: argparse.Namespace) -> None:
    for name in ("module", "no_python", "run_path"):
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(option, "be left out", option, "Name the TOML file: ranks run titan_rl.train.")


@record
def main() -> int:
    """The command line."""
    return launch(sys.argv[1:])


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # as torchrun starts its ranks with python -u
    sys.exit(main())
