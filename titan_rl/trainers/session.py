"""One start of a run: build the trainer, train, and leave a status that says how it ended."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_rl import heartbeat
from titan_rl.config.dump import to_toml
from titan_rl.config.toml import Document
from titan_rl.errors import ConfigError, TitanRLError
from titan_rl.resilience import faults, shelf, signals
from titan_rl.resilience.lock import FolderLock, unwritable
from titan_rl.resilience.status import Outcome, write_status
from titan_rl.resilience.stopping import EXIT_CODE
from titan_rl.resilience.watchdog import Watchdog
from titan_rl.titan.api import init_logger, logger
from titan_rl.titan.checkpoint_errors import CHECKPOINT_ERRORS, cause_of
from titan_rl.trainers import earlier_start
from titan_rl.trainers.configuration import RULES
from titan_rl.trainers.rl import EVALUATION_FOLDER


def run(config: Any, document: Document, *, evaluate_only: bool = False) -> int:
    """Build a trainer from its configuration, and train or evaluate.

    Args:
        config: From :func:`titan_rl.trainers.configuration.configure`.
        document: What it was made from: errors name the file and line of a key.
        evaluate_only: Score held-out prompts and leave configuration and status of the run as they are.

    Returns:
        0 when the run did what was asked, or stopped on request; 2 for the user's input; 1 otherwise. The
        cause is one line on standard error and in ``status.json``; the traceback of an unexpected error is
        printed too.
    """
    init_logger()
    session = _Session(config, is_training=not evaluate_only)
    try:
        if not session.start():
            return 0
        trainer: Any = session.trainer
        trainer.evaluate_only() if evaluate_only else trainer.train()
        session.finish()
    except CHECKPOINT_ERRORS as error:  # the rest is an interrupt, or the end of the process
        error = _as_users_input(error)
        if isinstance(error, ConfigError):
            error = document.located(error)
        elif not isinstance(error, TitanRLError):
            traceback.print_exc()
        session.fail(error)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


class _Session:
    """What a start does to its output directory, on the rank that writes there.

    Attributes:
        trainer: None until it is built.
    """

    def __init__(self, config: Any, *, is_training: bool) -> None:
        self.trainer: Any = None
        self._config, self._folder = config, Path(config.dump_folder)
        self._is_training = is_training
        self._writes = int(os.environ["RANK"]) == 0 and is_training
        self._lock: FolderLock | None = None
        self._watchdog = Watchdog(config.resilience.watchdog)
        # Whether status and configuration in the folder are this start's own.
        self._has_begun = False

    def start(self) -> bool:
        """Build the trainer; False if there is nothing left to do.

        Raises:
            ConfigError: the run cannot be started, or the folder is another job's.
        """
        text = to_toml(self._config, RULES)
        if not self._is_training:  # its results are one file of their own
            self._watch()
            self._config.metrics.enable_tensorboard = self._config.metrics.enable_wandb = False
            self.trainer = self._config.build()
            return True
        done = earlier_start.finished(self._config, text)
        if done is not None:
            if self._writes:
                self._clean_up()
                logger.info(done)
            return False
        if self._writes:
            self._lock = FolderLock(self._folder)
            if self._lock.stale is not None:
                logger.warning(
                    "Taking over %s: %s wrote to it and ended without saying so.",
                    self._folder,
                    self._lock.stale,
                )
        signals.listen(self._end_before_start)
        self._watch()
        earlier_start.refuse_overwriting(self._config, text)
        earlier_start.check_changes(self._config, text)
        is_first = earlier_start.results(self._config) is None
        if is_first:
            self._begin(text)
        self.trainer = self._config.build()
        # What an earlier start left is replaced only now: building refuses what does not continue it.
        if not is_first:
            self._begin(text)
        self.trainer.control.on_forced_end = self._end_at_once
        if self._lock is not None:
            self.trainer.at_safe_point = self._keep_lock
        return True

    def finish(self) -> None:
        """Say how the run ended, and release everything."""
        heartbeat.enter("end")
        outcome: Outcome = self.trainer.outcome
        faults.begin_step(self.trainer.step)
        faults.at("shutdown")
        if self._writes:
            write_status(self._folder, outcome, step=self.trainer.step, requeue=outcome != "done")
        self.trainer.control.wait_for_launcher()
        self.trainer.control.close()
        # The launcher's copy of a signal that was obeyed must not turn the exit code into another one.
        signals.listen(lambda _: None)
        self.trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._watchdog.close()
        self._unlock()

    def fail(self, error: BaseException) -> None:
        """Say the cause, leave it in ``status.json``, and release what the trainer holds.

        A refused start leaves the status of the run that it did not continue.
        """
        name = "ConfigError" if isinstance(error, ConfigError) else type(error).__name__
        cause = f"{name}: {error if isinstance(error, Exception) else cause_of(error)}"
        print(f"[rank {os.environ['RANK']}] {cause}", file=sys.stderr, flush=True)
        heartbeat.enter("end")
        if self.trainer is not None:
            cause = self.trainer.control.note_failure(cause)
        is_refusal = isinstance(error, ConfigError) and not self._has_begun
        is_ours = self._lock is None or self._lock.is_in_place()
        if self._writes and is_ours and not is_refusal and self._folder.is_dir():
            write_status(self._folder, "failed", step=getattr(self.trainer, "step", 0), cause=cause)
        if self.trainer is not None:
            try:
                self.trainer.close()
            except CHECKPOINT_ERRORS:
                logger.exception("Closing after a failure failed too.")
        self._watchdog.close()
        self._unlock()

    def _watch(self) -> None:
        """Have deadlines kept from here on. What is left of an earlier start does not change by it."""
        # An evaluation may run beside the training run, whose watchers meet in a folder of their own.
        folder = self._folder if self._is_training else self._folder / EVALUATION_FOLDER
        self._watchdog.start(
            folder,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            writes_status=self._is_training,
        )

    def _begin(self, text: str) -> None:
        if not self._writes:
            return
        self._clean_up()
        write_config(self._folder, text)
        write_status(self._folder, "running", step=0)
        if self._lock is not None:
            self._lock.claim()
        self._has_begun = True

    def _clean_up(self) -> None:
        """Of a save or a removal that was cut off: no save may come that would do it."""
        left = shelf.clean_up(self._folder / self._config.checkpoint.folder)
        if left:
            logger.info("Deleted what an interrupted start left behind: %s.", ", ".join(left))

    def _keep_lock(self) -> None:
        if self._lock is not None and self._lock.keep():
            logger.warning("%s was deleted while the run held it, and is made anew.", self._folder / ".lock")

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release(is_claimed=self._has_begun)

    def _end_before_start(self, number: signal.Signals) -> None:
        """Asked to stop while the trainer is built: there is nothing to save."""
        if number == signal.SIGUSR1:
            return
        cause = f"{number.name} before the first step"
        print(f"[rank {os.environ['RANK']}] Ending at once: {cause}.", file=sys.stderr)
        if self._has_begun:
            write_status(self._folder, "preempted", step=0, cause=cause, requeue=True)
        os._exit(EXIT_CODE)

    def _end_at_once(self, cause: str, failure: str | None) -> None:
        """In a thread, before the process ends without a safe point."""
        if not self._writes:
            return
        step = max(self.trainer.checkpointer.last_saved, 0) if self._config.checkpoint.enable else 0
        outcome: Outcome = "preempted" if failure is None else "failed"
        write_status(self._folder, outcome, step=step, cause=failure or cause, requeue=failure is None)


def _as_users_input(error: BaseException) -> BaseException:
    """The same error, or what the launch has to change if that is what it says."""
    if isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in str(error):
        return ConfigError(
            "MASTER_PORT",
            "be free on this machine",
            int(os.environ.get("MASTER_PORT", "0")),
            "Another job uses it: choose another port, or start with torchrun --standalone.",
        )
    return error


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
        partial = folder / "config.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, folder / "config.toml")
    except OSError as error:
        raise unwritable(folder, error) from error
