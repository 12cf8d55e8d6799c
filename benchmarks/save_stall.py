"""How long a checkpoint holds up training: saved synchronously, and asynchronously.

    torchrun --standalone --nproc-per-node 1 -m benchmarks.save_stall train_configs/tiny_sft.toml \\
        --model.hf_assets_path models/smollm2-135m --checkpoint.initial_load_path none \\
        --training.seq_len 64 --dump_folder FOLDER [--pairs 7] [--section.key value ...]

A stall is what the step that saves and the three steps after it take beyond four times the median step. One
trainer of the supervised kind, on one rank, trains on and saves by turns in the two ways, with
:class:`titan_rl.resilience.saving.CheckpointManager` as a run has it: manifest, hashes and retention
included, in FOLDER, whose file system is what is measured. It has no journal, which an RL run writes in
either way. The median is that of plain steps before each save. On a machine that is not quiet the thread that
trains waits for a core, more in one window than in another: the stalls are also given without these waits.

The gate: every checkpoint holds, bit for bit, the weights and the optimiser's moments as they were when it
was asked for, whatever the steps after that changed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from benchmarks import paired
from titan_rl.config.entry import read_checked
from titan_rl.functional.checksum import tensor_checksum
from titan_rl.titan import safe_reading
from titan_rl.titan.api import init_logger, logger
from titan_rl.titan.state import local
from titan_rl.trainers import initial_weights
from titan_rl.trainers.configuration import configure
from titan_rl.trainers.supervised import SupervisedTrainer

PLAIN_STEPS, STEPS_AFTER = 1, 3
LEAST_SECONDS = 0.01
"""What a stall counts as at least: one that is shorter cannot be told from none, and has no ratio."""
TARGET = 3.0


@dataclass(frozen=True, slots=True)
class Save:
    """One checkpoint.

    Attributes:
        window: Seconds of the step that saves, the save and the three steps after it.
        called: Seconds of those until the save returned.
        complete: Seconds from the save until the checkpoint was complete, or until the window was over.
        delayed: Seconds of the window in which the thread that trains was ready and had no core.
        blocked: Seconds of the window in which it waited for something else: the disk, the interpreter.
    """

    window: float
    called: float
    complete: float
    delayed: float
    blocked: float


class _Clock:
    """What this thread computed, and how long it was ready without a core, in seconds; Linux."""

    def __init__(self) -> None:
        self.computed = self.delayed = 0.0
        self.start()

    def start(self) -> None:
        self._before = self._read()

    def stop(self) -> None:
        computed, delayed = self._read()
        self.computed += computed - self._before[0]
        self.delayed += delayed - self._before[1]

    @staticmethod
    def _read() -> tuple[float, float]:
        computed, delayed, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return int(computed) / 1e9, int(delayed) / 1e9


class Bench:
    """A trainer that is built, and its steps one by one."""

    def __init__(self, trainer: SupervisedTrainer) -> None:
        """Bind it.

        Args:
            trainer: With checkpoints on, and a checkpoint due at every step.
        """
        self.trainer, self.manager = trainer, trainer.checkpointer
        self._batches = trainer.batch_generator(trainer.dataloader)
        self.plain: list[float] = []
        self.plain_ready: list[float] = []

    def save(self, mode: str) -> Save:
        """Some plain steps, a step with a save, and the steps after it.

        Args:
            mode: Of ``checkpoint.async_mode``.
        """
        manager: Any = self.manager
        manager.async_mode = type(manager.async_mode)(mode)
        for _ in range(PLAIN_STEPS):
            clock = _Clock()
            self.plain.append(self._step())
            clock.stop()
            self.plain_ready.append(self.plain[-1] - clock.delayed)
        clock = _Clock()
        window, step = self._step(), self.trainer.step
        clock.stop()
        wanted = {name: tensor_checksum(tensor) for name, tensor in self._tensors().items()}
        clock.start()
        started = time.perf_counter()
        manager.save(step)
        manager.save_deferred()
        called = time.perf_counter() - started
        window += called + sum(self._step() for _ in range(STEPS_AFTER))
        clock.stop()
        manager.maybe_wait_for_saving()
        complete = time.perf_counter() - started if mode != "disabled" else called
        if manager.last_saved != step:
            raise paired.UnequalOutputsError(f"The checkpoint of step {step} could not be written.")
        paired.check_equal(wanted, _stored(Path(manager.folder) / f"step-{step}", wanted), tolerance=0.0)
        found = Save(window, called, complete, clock.delayed, window - clock.computed - clock.delayed)
        plain = [self.plain[-PLAIN_STEPS:], self.plain_ready[-PLAIN_STEPS:]]
        logger.info("Saved with async_mode %s: %s; plain steps %s.", mode, found, plain)
        return found

    def _step(self) -> float:
        self.trainer.step += 1
        started = time.perf_counter()
        self.trainer.train_step(self._batches)
        return time.perf_counter() - started

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint holds of tensors, by the names that it has there."""
        states = self.manager._flattened_model_states_sd()
        values = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in states.items()}
        flat, _ = flatten_state_dict(values)
        return {name: local(v) for name, v in flat.items() if isinstance(v, torch.Tensor)}


def _stored(directory: Path, wanted: Mapping[str, int]) -> dict[str, int]:
    """Checksums of a checkpoint's tensors."""
    entries = safe_reading.read_metadata(directory).state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name in wanted
        if isinstance(entry := entries[name], TensorStorageMetadata)
    }
    safe_reading.load(tensors, str(directory))
    return {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


def measure(bench: Bench, *, pairs: int, mode: str) -> paired.Comparison:
    """The two ways by turns; the first save of each is not counted.

    Args:
        bench: Of the run.
        pairs: How many counted saves each has.
        mode: The asynchronous one.
    """
    saves: dict[str, list[Save]] = {"disabled": [], mode: []}
    for pair in range(-1, pairs):
        for way in saves if pair % 2 else reversed(saves):
            saves[way].append(bench.save(way))
    step = statistics.median(bench.plain[2 * PLAIN_STEPS :])
    counted = {way: found[1:] for way, found in saves.items()}
    stalls = {
        way: [max(save.window - (1 + STEPS_AFTER) * step, LEAST_SECONDS) for save in found]
        for way, found in counted.items()
    }
    newest = Path(bench.manager.folder) / f"step-{bench.manager.last_saved}"
    size = sum(path.stat().st_size for path in newest.iterdir())
    names = {"disabled": "synchronous", mode: "asynchronous"}
    ready = statistics.median(bench.plain_ready[2 * PLAIN_STEPS :])
    undelayed = {
        f"{names[way]} stall, s, without waits for a core": round(
            statistics.median(save.window - save.delayed for save in found) - (1 + STEPS_AFTER) * ready, 2
        )
        for way, found in counted.items()
    }
    times = {
        f"{names[way]} save, s until {until}": round(statistics.median(getattr(s, key) for s in found), 2)
        for way, found in counted.items()
        for until, key in (
            ("it returns", "called"),
            ("it is complete", "complete"),
        )
    }
    return paired.summarise(
        "stall of a step that saves and of the three after it",
        baseline=("synchronous", stalls["disabled"]),
        candidate=("asynchronous", stalls[mode]),
        target=TARGET,
        facts={
            "parameters": sum(p.numel() for part in bench.trainer.model_parts for p in part.parameters()),
            "MiB a checkpoint": round(size / 2**20),
            "median step, s": round(step, 3),
            **times,
            **undelayed,
        },
    )


def main() -> None:
    """Build a run's trainer and compare."""
    options = paired.parser(__doc__)
    options.add_argument("config", help="TOML file of a supervised run, and overrides")
    arguments, overrides = options.parse_known_args()
    always = ("checkpoint.enable=true", "checkpoint.interval=1", "checkpoint.keep_latest_k=2")
    always += ("checkpoint.async_mode=async", "training.steps=1000000", "validation.num_documents=0")
    given = [part for pair in always for part in (f"--{pair.partition('=')[0]}", pair.partition("=")[2])]
    init_logger()
    document, kind = read_checked(arguments.config, [*given, *overrides])
    trainer: SupervisedTrainer = configure(document, kind).build()
    initial_weights.load(trainer)
    found = measure(Bench(trainer), pairs=arguments.pairs, mode="async")
    paired.report("save_stall", [found], folder=arguments.out)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
