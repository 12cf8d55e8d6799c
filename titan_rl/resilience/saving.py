"""TorchTitan's checkpoint manager, with checkpoints that can be trusted.

Added to it: a checkpoint is written aside, hashed by the ranks that wrote it, gets its manifest last, and
only then its name; what is loaded is checked against the manifest first and read without running code in it;
retention goes by the order of writing; and a save that fails is counted before it ends the run.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

import titan_rl
from titan_rl import heartbeat
from titan_rl.errors import ConfigError, NonFiniteError, SaveError
from titan_rl.resilience import background, faults, shelf
from titan_rl.resilience import manifest as manifests
from titan_rl.resilience.manifest import DamagedCheckpointError, Facts, Manifest
from titan_rl.titan import api, safe_reading
from titan_rl.titan.api import logger
from titan_rl.titan.checkpoint_errors import CHECKPOINT_ERRORS, cause_of
from titan_rl.titan.collectives import HostGroup

CONFIG_NAME = "config.toml"
_LEARNT = ("model", "optimizer", "critic")
_MODEL = "model"  # TorchTitan's name of the model among the states


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """What ``[resilience]`` says about checkpoints.

    Attributes:
        max_failed_saves: So many failures in a row end the run.
        keep_best: Checkpoints with the best held-out scores that retention keeps besides the latest.
    """

    max_failed_saves: int = 3
    keep_best: int = 1


@dataclass(frozen=True, slots=True)
class _Task:
    """One checkpoint on its way."""

    step: int
    facts: Facts
    is_resumable: bool


class CheckpointManager(api.CheckpointManager):
    """Saves and loads the checkpoints of a run; see the module.

    Attributes:
        policy: How failures are taken, and what is kept.
        facts: Asked on every rank when a checkpoint is saved.
        defers: Whether :meth:`save` waits for :meth:`save_deferred`: where a checkpoint is saved before the
            held-out score of its step is measured.
        last_saved: Step of the newest complete checkpoint that this start wrote or loaded; -1 before.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(api.CheckpointManager.Config):
        """TorchTitan's section, unchanged."""

        def __post_init__(self) -> None:
            # Without a path TorchTitan warns of this key, whose default is true: in every run.
            value = self.initial_load_model_only
            self.initial_load_model_only = value and bool(self.initial_load_path or self.initial_load_in_hf)
            api.CheckpointManager.Config.__post_init__(self)
            self.initial_load_model_only = value

    facts: Callable[[], Facts]
    _deferred: tuple[int, bool] | None

    def __init__(self, config: Config, *, base_folder: str = "", **given: Any) -> None:
        """Build TorchTitan's manager, and a group for what the ranks agree on. Collective.

        Args:
            config: ``[checkpoint]``.
            base_folder: The run's ``dump_folder``.
            given: What TorchTitan gives besides.

        Raises:
            ConfigError: ``checkpoint.folder`` is not on a file system.
        """
        self.policy, self.facts, self.last_saved = SavePolicy(), Facts, -1
        self.defers, self._deferred = False, None
        if config.enable and "://" in config.folder:
            self.enable = False  # for TorchTitan's __del__
            raise ConfigError(
                "checkpoint.folder",
                "be a directory that all ranks share: a checkpoint is complete when it is renamed",
                config.folder,
                "Save to a file system, and copy complete checkpoints from there.",
            )
        super().__init__(config, base_folder=base_folder, **given)
        self._num_failed = 0
        if self.enable:
            self._shelf, self._config_path = Path(self.folder), Path(base_folder) / CONFIG_NAME
            self._group, self._task, self._is_writing = HostGroup(), _Task(-1, Facts(), True), False

    # ------------------------------------------------------------------------------------------- saving

    def save_now(self, step: int) -> bool:
        """Save a checkpoint and wait until it is complete, unless there is one of this step. Collective.

        Args:
            step: Of the weights as they are. At step 0 there is nothing to save.

        Returns:
            Whether there is a complete checkpoint of this step.

        Raises:
            SaveError: too many saves in a row have failed.
        """
        if not self.enable or self.load_only or step == 0:
            return False
        self.maybe_wait_for_saving()
        if self.last_saved != step:
            self._write(step, is_last=False)
            self.maybe_wait_for_saving()
        return self.last_saved == step

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        if self.defers:
            self._deferred = (curr_step, last_step)
            return True
        return self._save_at_once(curr_step, last_step)

    def save_deferred(self) -> None:
        """Save what :meth:`save` has put off. Collective.

        Raises:
            SaveError: the last checkpoint of a run failed, or too many in a row.
        """
        if self.enable and self._deferred is not None:
            (step, is_last), self._deferred = self._deferred, None
            self._save_at_once(step, is_last)

    def _save_at_once(self, curr_step: int, last_step: bool) -> bool:
        self.maybe_wait_for_saving()
        if self.last_saved == curr_step and not (last_step and self.last_save_model_only):
            return True  # it was asked for at this very step
        return self._write(curr_step, is_last=last_step)

    def _write(self, step: int, *, is_last: bool) -> bool:
        """Write a checkpoint and complete it, in asynchronous mode in the background. Collective.

        Returns:
            Whether it is complete or on its way.

        Raises:
            SaveError: the last checkpoint of a run failed, or too many in a row.
            NonFiniteError: the weights or the optimiser's moments are not finite.
        """
        with heartbeat.phase("checkpoint"):
            return self._write_and_complete(step, is_last=is_last)

    def _write_and_complete(self, step: int, *, is_last: bool) -> bool:
        self._refuse_bad_state(step)
        is_resumable = not (is_last and self.last_save_model_only)
        self._task = task = _Task(step, self.facts(), is_resumable)
        try:
            self._agree(lambda: self._prepare(step))
            self._is_writing = True
            super()._save(step, is_last)
            pending, self.save_future = self.save_future, None
            if pending is None:
                self._complete(task)
        except CHECKPOINT_ERRORS as error:
            self._failed(error, ends_run=is_last)
            return False
        finally:
            self._is_writing = False
        if pending is None:
            self._num_failed = 0
        else:
            self.save_future = self._in_background(task, pending)
        return True

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """TorchTitan's, but for ``async_mode = "async"``: see :mod:`titan_rl.resilience.background`."""
        if to_hf or async_mode.value != "async":
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        if self.stager is None:
            self.stager = background.stager()
        return background.save(state_dict, checkpoint_id, group=self.pg, copies=self.stager)

    def _refuse_bad_state(self, step: int) -> None:
        """What is not finite would be resumed for ever: it never becomes a checkpoint. Collective."""
        states = {name: self.states[name].state_dict() for name in _LEARNT if name in self.states}
        first = self._group.first(_find_non_finite(states))
        if first is not None:
            raise NonFiniteError(
                f"The state of step {step} must be finite to be saved; got {first[1]} on rank {first[0]}. "
                "Start again: the checkpoint before it is resumed. Lower optimizer.lr if it comes back."
            )

    def _prepare(self, step: int) -> None:
        """Make the directory, with the configuration of this start in it."""
        faults.at("checkpoint.stage", step=step)
        if self._group.rank:
            return
        left = shelf.clean_up(self._shelf)
        if left:
            logger.info("Deleted what an interrupted start left behind: %s.", ", ".join(left))
        directory = shelf.saving_path(self._shelf, step)
        directory.mkdir(parents=True)
        if self._config_path.is_file():
            shutil.copyfile(self._config_path, directory / CONFIG_NAME)

    def _in_background(self, task: _Task, pending: Future[Any]) -> Future[Any]:
        """Complete an asynchronous save when its files are written."""
        worker = ThreadPoolExecutor(1, thread_name_prefix="complete-checkpoint")

        def complete() -> None:
            background.yield_to_training()
            pending.result()
            self._complete(task)

        future = worker.submit(complete)
        worker.shutdown(wait=False)
        return future

    def _complete(self, task: _Task) -> None:
        """Hash, write the manifest, give the checkpoint its name, and retire old ones. Collective.

        Raises:
            SaveError: on every rank, when it failed on any.
        """
        started, directory = time.perf_counter(), shelf.saving_path(self._shelf, task.step)
        self._agree(lambda: self._hash_share(task, directory))
        seconds = time.perf_counter() - started
        self._agree(lambda: self._commit(task, directory))
        self.last_saved = task.step
        logger.info("Checkpoint of step %d is complete; hashing took %.2f seconds.", task.step, seconds)
        faults.at("checkpoint.after_commit", step=task.step)
        self._retire(task)

    def _hash_share(self, task: _Task, directory: Path) -> None:
        faults.at("checkpoint.shard", step=task.step)
        rank, world_size = self._group.rank, self._group.world_size
        mine = manifests.share(manifests.file_names(directory), rank=rank, world_size=world_size)
        manifests.write_sidecar(directory, rank, {n: manifests.hash_file(directory / n) for n in mine})

    def _commit(self, task: _Task, directory: Path) -> None:
        faults.at("checkpoint.before_commit", step=task.step)
        if self._group.rank:
            return
        hashed = manifests.take_sidecars(directory)
        # What another rank's view of the file system did not show yet is hashed here.
        names = manifests.file_names(directory)
        files = {name: hashed.get(name) or manifests.hash_file(directory / name) for name in names}
        found = shelf.entries(self._shelf)
        known = [entry.manifest.sequence for entry in found if entry.manifest is not None]
        manifest = Manifest(
            step=task.step,
            sequence=max(known, default=0) + 1,
            files=files,
            is_resumable=task.is_resumable,
            world_size=self._group.world_size,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            titan_rl=titan_rl.__version__,
            model=self._model_fingerprint(directory),
            config=files[CONFIG_NAME].sha256 if CONFIG_NAME in files else "",
            facts=task.facts,
        )
        manifests.write(directory, manifest)
        replaced = shelf.put_in_place(self._shelf, task.step)
        self._delete([] if replaced is None else [replaced])

    def _model_fingerprint(self, directory: Path) -> str:
        if not (directory / ".metadata").is_file():
            return ""
        shapes = safe_reading.tensor_shapes(safe_reading.read_metadata(directory))
        others = tuple(f"{name}." for name in self.states if name != _MODEL)
        return manifests.fingerprint({n: shape for n, shape in shapes.items() if not n.startswith(others)})

    def _retire(self, task: _Task) -> None:
        """Take away what retention does not keep. A failure is no failure of the checkpoint just saved."""
        old: list[Path] = []
        try:
            if self._group.rank == 0:
                found = shelf.entries(self._shelf)
                old = shelf.to_remove(found, keep_latest=self.keep_latest_k, keep_best=self.policy.keep_best)
                old = [shelf.discard(path) for path in old]
            faults.at("checkpoint.purge", step=task.step)
            self._delete(old)
        except OSError as error:
            logger.warning("Old checkpoints could not be removed: %s.", error)

    def _delete(self, paths: list[Path]) -> None:
        for path in paths:
            if self.purge_thread is not None:
                self.purge_queue.put(str(path))
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _failed(self, error: BaseException, *, ends_run: bool = False) -> None:
        """Count a failed save, and remove what there is of it.

        Raises:
            SaveError: it was the last checkpoint of the run, or too many in a row have failed.
        """
        step, cause = self._task.step, describe(error)
        self._num_failed += 1
        if self._group.rank == 0:
            shelf.note_failure(self._shelf, step, cause)
        limit = self.policy.max_failed_saves
        remedy = "The checkpoint before it is intact: remove the cause, and start again."
        if ends_run:
            raise SaveError(
                f"The last checkpoint, of step {step}, could not be written: {cause}. {remedy}"
            ) from error
        if self._num_failed >= limit:
            raise SaveError(
                f"The checkpoint of step {step} could not be written: {cause}. {self._num_failed} in a row "
                f"have failed, as many as resilience.max_failed_saves allows. {remedy}"
            ) from error
        logger.warning(
            "The checkpoint of step %d could not be written: %s. Training goes on; the one before it is "
            "intact. %d of at most %d failures in a row.",
            step,
            cause,
            self._num_failed,
            limit,
        )

    def _agree(self, act: Callable[[], None]) -> None:
        """Do something on every rank, and fail on every rank if it failed on any. Collective."""
        error = None
        try:
            act()
        except Exception as caught:
            error = caught
        failed = self._group.first(None if error is None else f"{type(error).__name__}: {error}")
        if failed is not None:
            raise SaveError(f"rank {failed[0]}: {failed[1]}") from error

    # What TorchTitan's manager asks of itself.

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return self._is_writing or super()._should_save(curr_step, last_step)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        if self._is_writing:
            return str(shelf.saving_path(self._shelf, step))
        return super()._create_checkpoint_id(step, folder)

    def _purge_stale_checkpoints(self) -> None:
        """Nothing: TorchTitan would go by step, and count what is still being written. See ``_retire``."""

    def _wait_for_saving(self) -> None:
        pending, self.save_future = self.save_future, None
        if pending is None:
            return
        try:
            with heartbeat.phase("checkpoint"):
                pending.result()
        except CHECKPOINT_ERRORS as error:
            self._failed(error)
        else:
            self._num_failed = 0

    # ------------------------------------------------------------------------------------------ loading

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load into a state dict. Collective.

        Raises:
            ConfigError: the checkpoint is another model's, or holds other states than this run has.
        """
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        self._refuse_another_model(state_dict, checkpoint_id)
        try:
            safe_reading.load(state_dict, checkpoint_id)
        except CheckpointException as error:
            raise ConfigError(
                f"The checkpoint {checkpoint_id}",
                "hold the states of this run",
                describe(error),
                "Choose another dump_folder; to start from its weights alone, name it in "
                "checkpoint.initial_load_path.",
            ) from error
        if _MODEL in self.states:
            self.states[_MODEL].load_state_dict(state_dict)

    def _load(self, step: int = -1) -> bool:
        if step != -1:
            path = self._shelf / f"step-{step}"
            fault = self._find_fault(path)
            if fault is not None:
                raise shelf.no_such_checkpoint(step, fault)
        self._found = step
        is_loaded = super()._load(step)
        self.last_saved = self._found if is_loaded else -1
        return is_loaded

    def _find_load_step(self, folder: str = "") -> int:
        """Step of the newest checkpoint whose files are what its manifest says; -1 if there is none.

        Raises:
            ConfigError: there are checkpoints, and none is complete.
        """
        found = shelf.entries(self._shelf)
        if self._group.rank == 0:
            for entry in found:
                if entry.fault is not None:
                    logger.warning("%s: it is not used.", entry.fault)
        names = " ".join(path.name for path, _ in shelf.newest_first(found)[:50])
        _, ordered = self._group.first(names if self._group.rank == 0 else None) or (0, "")
        for name in ordered.split():
            fault = self._find_fault(self._shelf / name)
            if fault is None:
                self._found = int(name.removeprefix("step-"))
                return self._found
            logger.warning("%s: it is not used, but the one before it.", fault)
        if found:
            raise shelf.none_complete(self._shelf, found)
        return -1

    def _find_fault(self, path: Path) -> str | None:
        """What is wrong with a checkpoint, hashes included; each rank looks at its share. Collective."""
        fault, rank, world_size = None, self._group.rank, self._group.world_size
        try:
            manifest = manifests.read(path)
            names = manifests.share(manifest.files, rank=rank, world_size=world_size)
            fault = manifests.find_fault(path, manifest, names=names, hashes=True)
        except DamagedCheckpointError as error:
            fault = str(error)
        first = self._group.first(fault)
        return None if first is None else first[1]

    def _refuse_another_model(self, state_dict: dict[str, Any], directory: str) -> None:
        difference = None
        try:
            stored = safe_reading.tensor_shapes(safe_reading.read_metadata(directory))
            difference = _difference(state_dict, stored)
        except (OSError, safe_reading.UnsafeCheckpointError) as error:
            difference = str(error)
        first = self._group.first(difference)
        if first is not None:
            raise ConfigError(
                f"The checkpoint {directory}",
                "be one of this model",
                first[1],
                "Restore [model], or choose another dump_folder.",
            )


def _find_non_finite(state: Any, name: str = "") -> str | None:
    """The first tensor of a nested state that holds NaN or infinity, in words; None if there is none."""
    if isinstance(state, Mapping):
        parts = (
            _find_non_finite(value, f"{name}.{key}" if name else str(key)) for key, value in state.items()
        )
        return next((part for part in parts if part is not None), None)
    value = state.to_local() if isinstance(state, DTensor) else state
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return None
    low, high = (float(end) for end in value.detach().aminmax())
    return None if math.isfinite(low) and math.isfinite(high) else f"{name} from {low} to {high}"


def describe(error: BaseException) -> str:
    """One line about why a save or a load failed, with the rank where DCP knows it."""
    return str(error).splitlines()[0] if isinstance(error, SaveError) else cause_of(error)


def _difference(state_dict: dict[str, Any], stored: dict[str, tuple[tuple[int, ...], str]]) -> str | None:
    """Tensors of the state dict that a checkpoint lacks or has in another shape, in words; None if none."""
    wrong = []
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            continue
        here, there = list(value.shape), stored.get(name)
        if there is None or list(there[0]) != here:
            wrong.append(f"{name} {'missing' if there is None else list(there[0])} instead of {here}")
    if not wrong:
        return None
    return ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if wrong[3:] else "")
