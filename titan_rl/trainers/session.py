"""One start of a run: build the trainer, train, and leave a status that says how it ended."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_rl.config.dump import to_toml
from titan_rl.config.toml import Document
from titan_rl.errors import ConfigError, TitanRLError
from titan_rl.resilience.status import write_status
from titan_rl.titan.api import init_logger, logger
from titan_rl.trainers import earlier_start
from titan_rl.trainers.configuration import RULES


def run(config: Any, document: Document, *, evaluate_only: bool = False) -> int:
    """Build a trainer from its configuration, and train or evaluate.

    Args:
        config: From :func:`titan_rl.trainers.configuration.configure`.
        document: What it was made from: errors name the file and line of a key.
        evaluate_only: Score held-out prompts and leave configuration and status of the run as they are.

    Returns:
        0 when the run did what was asked; 2 for the user's input; 1 otherwise. The cause is one line on
        standard error and in ``status.json``; the traceback of an unexpected error is printed too.
    """
    init_logger()
    folder, trainer = Path(config.dump_folder), None
    writes_status = int(os.environ["RANK"]) == 0 and not evaluate_only
    is_first = earlier_start.results(config) is None
    try:
        text = to_toml(config, RULES)
        if evaluate_only:  # its results are one file of their own
            config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
        else:
            done = earlier_start.finished(config, text)
            if done is not None:
                if writes_status:
                    logger.info(done)
                return 0
            earlier_start.refuse_overwriting(config, text)
        if writes_status and is_first:
            _begin(folder, text)
        trainer = config.build()
        # What an earlier start left is replaced only now: building refuses what does not continue it.
        if writes_status and not is_first:
            _begin(folder, text)
        trainer.evaluate_only() if evaluate_only else trainer.train()
    except Exception as error:
        if isinstance(error, ConfigError):
            error = document.located(error)
        elif not isinstance(error, TitanRLError):
            traceback.print_exc()
        # A refused start leaves the status of the run that it did not continue.
        is_refusal = not is_first and trainer is None and isinstance(error, ConfigError)
        _fail(trainer, error, folder=folder if writes_status and not is_refusal else None)
        return 2 if isinstance(error, ConfigError) else 1
    if writes_status:
        write_status(folder, "done", step=trainer.step)
    trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _begin(folder: Path, text: str) -> None:
    write_config(folder, text)
    write_status(folder, "running", step=0)


def write_config(folder: Path, text: str) -> None:
    """Make the output directory and write the resolved configuration into it.

    Args:
        folder: The run's ``dump_folder``.
        text: The configuration, from :func:`titan_rl.config.dump.to_toml` before a trainer is built from it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "dump_folder",
            "be a directory that can be written",
            f"{folder} ({error.strerror})",
            "Free some space, or set dump_folder to another directory.",
        ) from error


def _fail(trainer: Any, error: Exception, *, folder: Path | None) -> None:
    """Say the cause, leave it in ``status.json`` of ``folder``, and release what the trainer holds."""
    name = "ConfigError" if isinstance(error, ConfigError) else type(error).__name__
    cause = f"{name}: {error}"
    print(f"[rank {os.environ['RANK']}] {cause}", file=sys.stderr, flush=True)
    if folder is not None and folder.is_dir():
        write_status(folder, "failed", step=getattr(trainer, "step", 0), cause=cause)
    if trainer is not None:
        try:
            trainer.close()
        except Exception:
            logger.exception("Closing after a failure failed too.")
