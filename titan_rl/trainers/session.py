"""One start of a run: build the trainer, train, and leave a status that says how it ended."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_rl.config.dump import to_toml
from titan_rl.errors import ConfigError, TitanRLError
from titan_rl.resilience.status import write_status
from titan_rl.titan.api import init_logger, logger
from titan_rl.trainers.configuration import RULES


def run(config: Any) -> int:
    """Build a trainer from its configuration and train.

    Args:
        config: From :func:`titan_rl.trainers.configuration.configure`.

    Returns:
        0 when the run did what was asked; 2 for the user's input; 1 otherwise. The cause is one line on
        standard error and in ``status.json``; the traceback of an unexpected error is printed too.
    """
    init_logger()
    folder, rank = Path(config.dump_folder), int(os.environ["RANK"])
    trainer = None
    try:
        if rank == 0:
            write_config(folder, config)
            write_status(folder, "running", step=0)
        trainer = config.build()
        trainer.train()
    except ConfigError as error:
        return _fail(folder, rank, trainer, f"ConfigError: {error}", code=2)
    except TitanRLError as error:
        return _fail(folder, rank, trainer, f"{type(error).__name__}: {error}", code=1)
    except Exception as error:
        traceback.print_exc()
        return _fail(folder, rank, trainer, f"{type(error).__name__}: {error}", code=1)
    if rank == 0:
        write_status(folder, "done", step=trainer.step)
    trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def write_config(folder: Path, config: Any) -> None:
    """Make the output directory and write the resolved configuration into it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(to_toml(config, RULES), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "dump_folder",
            "be a directory that can be written",
            f"{folder} ({error.strerror})",
            "Free some space, or set dump_folder to another directory.",
        ) from error


def _fail(folder: Path, rank: int, trainer: Any, cause: str, *, code: int) -> int:
    step = getattr(trainer, "step", 0)
    print(f"[rank {rank}] {cause}", file=sys.stderr, flush=True)
    if rank == 0 and folder.is_dir():
        write_status(folder, "failed", step=step, cause=cause)
    if trainer is not None:
        try:
            trainer.close()
        except Exception:
            logger.exception("Closing after a failure failed too.")
    return code
