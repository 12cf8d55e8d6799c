"""A generator that plants faults into the run that it belongs to, chosen by ``[generator] type``.

``point`` names what happens and where, ``step`` the checkpoint (or the iteration) in which it happens,
``rank`` on which rank (-1: on all). Each fault leaves a file ``planted`` in the run's ``dump_folder``: the
witness.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from titan_rl.generation.local import LocalGenerator
from titan_rl.resilience import manifest as manifests
from titan_rl.resilience import shelf
from titan_rl.trainers import optimization
from titan_rl.trainers.rl import RLTrainer


class PlantedLocal(LocalGenerator):
    @dataclass(kw_only=True, slots=True)
    class Config(LocalGenerator.Config):
        point: str = ""
        step: int = 0
        rank: int = 0
        seconds_per_token: float = 0.0

    def __init__(self, config: Config, context: Any) -> None:
        super().__init__(config, context)
        self._seconds = config.seconds_per_token
        if config.point and config.rank in (int(os.environ["RANK"]), -1):
            _POINTS[config.point](config.step)

    def _step(self) -> None:
        time.sleep(self._seconds)
        super()._step()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _witness(path: Path) -> None:
    """``path`` lies somewhere below ``<dump_folder>/checkpoint``."""
    folder = next(parent for parent in (path, *path.parents) if parent.name == "checkpoint")
    (folder.parent / "planted").touch()


def _is_of(path: Path, step: int) -> bool:
    return path.name in (f"saving-{step}", f"step-{step}")


def _before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Do something before a function of a module or class is called, with the same arguments."""
    original = getattr(owner, name)

    def replaced(*arguments: Any, **named: Any) -> Any:
        act(*arguments)
        return original(*arguments, **named)

    setattr(owner, name, replaced)


def _kill_in_write(step: int) -> None:
    """While DCP writes: half a shard is there."""

    def act(writer: Any, *_: Any) -> None:
        if _is_of(Path(writer.path), step):
            _witness(Path(writer.path))
            (Path(writer.path) / "__0_0.distcp").write_bytes(b"half")
            _kill()

    _before(FileSystemWriter, "write_data", act)


def _kill_before_manifest(step: int) -> None:
    def act(directory: Path, *_: Any) -> None:
        if _is_of(directory, step):
            _witness(directory)
            _kill()

    _before(manifests, "write", act)


def _kill_before_rename(step: int) -> None:
    def act(folder: Path, of_step: int) -> None:
        if of_step == step:
            _witness(folder)
            _kill()

    _before(shelf, "put_in_place", act)


def _kill_after_rename(step: int) -> None:
    original = shelf.put_in_place

    def replaced(folder: Path, of_step: int) -> Path | None:
        found = original(folder, of_step)
        if of_step == step:
            _witness(folder)
            _kill()
        return found

    shelf.put_in_place = replaced


def _kill_in_purge(step: int) -> None:
    """When the oldest checkpoint has lost its name and one file."""

    def act(path: Any, *_: Any, **__: Any) -> None:
        if Path(path).name.startswith("removing-"):
            next(Path(path).glob("*.distcp")).unlink()
            _witness(Path(path))
            _kill()

    _before(shutil, "rmtree", act)


def _fail(code: int) -> Callable[[int], None]:
    """From the checkpoint of a step on, writing fails."""

    def plant(step: int) -> None:
        def act(writer: Any, *_: Any) -> None:
            if int(Path(writer.path).name.rpartition("-")[2]) >= step:
                _witness(Path(writer.path))
                raise OSError(code, os.strerror(code))

        _before(FileSystemWriter, "write_data", act)

    return plant


def _hang_in_training(step: int) -> None:
    """An optimiser step that takes for ever."""

    def act(trainer: Any, *_: Any) -> None:
        if trainer.step == step:
            (Path(trainer.config.dump_folder) / "planted").touch()
            time.sleep(600)

    _before(RLTrainer, "optimizer_step", act)


def _sigterm_in_evaluation(step: int) -> None:
    def act(trainer: Any) -> None:
        if trainer.step == step:
            (Path(trainer.config.dump_folder) / "planted").touch()
            os.kill(os.getpid(), signal.SIGTERM)

    _before(RLTrainer, "evaluate", act)


def _slow_save(step: int) -> None:
    """A checkpoint that takes some seconds to write."""

    def act(writer: Any, *_: Any) -> None:
        if _is_of(Path(writer.path), step):
            _witness(Path(writer.path))
            time.sleep(3)

    _before(FileSystemWriter, "write_data", act)


def _raise_in_training(step: int) -> None:
    def act(trainer: Any, *_: Any) -> None:
        if trainer.step == step:
            (Path(trainer.config.dump_folder) / "planted").touch()
            raise ValueError("planted in the optimiser step")

    _before(RLTrainer, "optimizer_step", act)


def _hang_in_three_ways(step: int) -> None:
    """From a step on, each once: rank 1 is stopped, rank 0 loops, rank 1 skips a collective."""
    ways = [_stop_rank_1, _loop_on_rank_0, _skip_on_rank_1]

    def act(trainer: Any, *_: Any) -> None:
        number = trainer.step - step
        witness = Path(trainer.config.dump_folder) / f"planted-{number}"
        if 0 <= number < len(ways) and not witness.exists():
            dist.barrier()
            witness.touch()
            with trainer.timer.stage("train"):
                ways[number](trainer.collectives.rank)

    _before(RLTrainer, "optimizer_step", act)


def _stop_rank_1(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def _loop_on_rank_0(rank: int) -> None:
    while rank == 0:
        pass


def _skip_on_rank_1(rank: int) -> None:
    group = dist.new_group([0, 1])
    if rank == 0:
        dist.barrier(group)


def _slow_training(step: int) -> None:
    """Before each step of the optimiser, rank 1 does for 1.5 s what rank 0 does for 0.5 s."""

    def act(trainer: Any, *_: Any) -> None:
        with trainer.timer.stage("train"):
            time.sleep(1.5 if trainer.collectives.rank == 1 else 0.5)

    _before(RLTrainer, "optimizer_step", act)


def _bad_steps(step: int) -> None:
    """On one rank, each once: log-probabilities, an advantage and gradients that are not finite, a spike."""

    def act(trainer: Any, batch: Any) -> None:
        kind = _BAD_STEPS.get(trainer.step)
        if kind is not None and trainer.step >= step:
            _spoil(trainer, batch, kind)

    _before(RLTrainer, "optimizer_step", act)


_BAD_STEPS = {2: "logprobs", 4: "advantage", 6: "nan", 8: "inf", 12: "spike"}


def _spoil(trainer: Any, batch: Any, kind: str) -> None:
    if kind == "advantage":
        batch.micro_batches[0].advantages.fill_(math.nan)
    elif kind == "logprobs":
        _once(optimization, "token_scores", _with_nan)
    else:
        _once(trainer.policy, "clip_grad_norm", functools.partial(_with_gradient, trainer.policy, kind))


def _once(owner: Any, name: str, wrapped: Callable[..., Any]) -> None:
    """Call something else in the place of a function, the next time."""
    original = getattr(owner, name)

    def replaced(*arguments: Any, **named: Any) -> Any:
        setattr(owner, name, original)
        return wrapped(original, *arguments, **named)

    setattr(owner, name, replaced)


def _with_nan(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    scores = original(*arguments, **named)
    return dataclasses.replace(scores, logprobs=scores.logprobs * math.nan)


def _with_gradient(policy: Any, kind: str, original: Callable[..., Any], *arguments: Any) -> Any:
    for parameter in policy.parameters():
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        gradient.mul_(1e4) if kind == "spike" else gradient.fill_(float(kind))
    return original(*arguments)


def _bad_from(step: int) -> None:
    """From a step on, all gradients of one rank are NaN."""

    def act(trainer: Any, batch: Any) -> None:
        if trainer.step >= step:
            _spoil(trainer, batch, "nan")

    _before(RLTrainer, "optimizer_step", act)


def _bad_once(step: int) -> None:
    """The first time that a step is made, the gradients of one rank are NaN."""

    def act(trainer: Any, batch: Any) -> None:
        witness = Path(trainer.config.dump_folder) / "planted"
        if trainer.step == step and not witness.exists():
            witness.touch()
            _spoil(trainer, batch, "nan")

    _before(RLTrainer, "optimizer_step", act)


_POINTS: dict[str, Callable[[int], None]] = {
    "kill_in_write": _kill_in_write,
    "kill_before_manifest": _kill_before_manifest,
    "kill_before_rename": _kill_before_rename,
    "kill_after_rename": _kill_after_rename,
    "kill_in_purge": _kill_in_purge,
    "write_error": _fail(errno.EIO),
    "read_only": _fail(errno.EROFS),
    "hang_in_training": _hang_in_training,
    "raise_in_training": _raise_in_training,
    "sigterm_in_evaluation": _sigterm_in_evaluation,
    "slow_save": _slow_save,
    "hang_in_three_ways": _hang_in_three_ways,
    "slow_training": _slow_training,
    "bad_steps": _bad_steps,
    "bad_from": _bad_from,
    "bad_once": _bad_once,
}
