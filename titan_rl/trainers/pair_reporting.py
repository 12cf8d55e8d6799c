"""What a preference or reward-model run reports: metrics, progress, the summary and the export."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.errors import TitanRLError
from titan_rl.observability.progress import duration, progress_line
from titan_rl.observability.summary import read_json, steps_in, write_json
from titan_rl.resilience.manifest import HeldOut
from titan_rl.titan.api import logger
from titan_rl.titan.device import peak_memory_bytes
from titan_rl.trainers.slow_ranks import stragglers

if TYPE_CHECKING:
    from titan_rl.trainers.pair_trainer import PairTrainer, StepOutcome

_STAGES = ("reference", "train", "evaluate", "checkpoint")


@dataclass(slots=True)
class PairSummary:
    """``summary.json`` of a preference or reward-model run.

    Attributes:
        steps: Optimiser steps done by the whole run, earlier starts included.
        policy_version: Optimiser updates that were applied.
        accuracy_before: Held-out accuracy before the first step, a tie being half; None if not evaluated.
        accuracy_after: The same after the last step.
        margin_before: Mean held-out difference of rewards before the first step.
        margin_after: The same after the last step.
        evaluations: All held-out metrics by step.
        num_evaluated: Held-out preferences of one evaluation.
        seconds: Wall-clock seconds of this start.
        stage_seconds: Of this start, by stage.
        paths: Where everything lies.
    """

    steps: int = 0
    policy_version: int = 0
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    margin_before: float | None = None
    margin_after: float | None = None
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    num_evaluated: int = 0
    seconds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)

    def update(self, step: int) -> None:
        """Take what stands before and after from the evaluations."""
        before, after = self.evaluations.get(0, {}), self.evaluations.get(step, {})
        self.accuracy_before, self.accuracy_after = before.get("accuracy"), after.get("accuracy")
        self.margin_before, self.margin_after = before.get("margin"), after.get("margin")

    def text(self) -> str:
        """Format for a person."""
        lines = [f"Done: {self.steps} steps in {duration(self.seconds)}."]
        before, after = self.evaluations.get(0), self.evaluations.get(self.steps)
        if before is not None and after is not None:
            lines += [
                f"Held-out {name} on {self.num_evaluated} preferences: "
                f"{_with_error(name, before, self.num_evaluated)} before, "
                f"{_with_error(name, after, self.num_evaluated)} after."
                for name in ("accuracy", "margin")
            ]
        lines += [f"  {name + ':':<12} {seconds:.1f} s" for name, seconds in self.stage_seconds.items()]
        lines += [f"  {name + ':':<12} {path}" for name, path in self.paths.items()]
        return "\n".join(lines)


def _with_error(name: str, metrics: Mapping[str, float], count: int) -> str:
    """A mean over ``count`` preferences, with its standard error where the metrics tell it."""
    value = metrics[name]
    deviation = math.sqrt(value * (1 - value)) if name == "accuracy" else metrics.get(f"{name}_std")
    if deviation is None:
        return f"{value:.3f}"
    return f"{value:.3f} +- {deviation / math.sqrt(count):.3f}"


class PairReporter:
    """Reduces over ranks and writes. Its collective methods are called on every rank."""

    def __init__(self, trainer: PairTrainer) -> None:
        """Bind a trainer whose collaborators are built."""
        self._trainer, self._collectives = trainer, trainer.collectives
        self._folder = Path(trainer.config.dump_folder)
        self._summary = PairSummary()
        self._evaluation: dict[str, float] = {}
        self._started_step, self._started = 0, time.perf_counter()

    def start(self) -> None:
        """After the checkpoint is restored: keep the evaluations of earlier starts up to its step."""
        trainer = self._trainer
        self._started_step = trainer.step
        if trainer.step:
            stored = read_json(self._folder / "summary.json")  # on every rank: all judge the gain at the end
            self._summary.evaluations = steps_in(stored, "evaluations")
            self._summary.num_evaluated = stored.get("num_evaluated", 0)
        self.forget_later_steps()
        self._collectives.barrier()

    def forget_later_steps(self) -> None:
        """Drop evaluations of steps after the present one, which are done again."""
        step, known = self._trainer.step, self._summary.evaluations
        self._summary.evaluations = {s: v for s, v in known.items() if s <= step}

    def evaluation(self, metrics: Mapping[str, float], num_preferences: int) -> None:
        """Report one evaluation.

        Args:
            metrics: Over all ranks, by name.
            num_preferences: Held-out preferences.
        """
        trainer = self._trainer
        named = {f"evaluation/{name}": value for name, value in metrics.items()}
        self._evaluation = named
        self._summary.num_evaluated = num_preferences
        self._summary.evaluations[trainer.step] = dict(metrics)
        trainer.metrics_processor.logger.log(named, trainer.step)
        if self._collectives.rank == 0:
            logger.info(
                "step %d  held-out accuracy %s  margin %s  loss %.4f  on %d preferences",
                trainer.step,
                _with_error("accuracy", metrics, num_preferences),
                _with_error("margin", metrics, num_preferences),
                metrics["loss"],
                num_preferences,
            )

    def held_out(self, step: int) -> HeldOut | None:
        """The accuracy measured at a step, if any was."""
        metrics = self._summary.evaluations.get(step, {})
        return HeldOut("evaluation/accuracy", metrics["accuracy"]) if "accuracy" in metrics else None

    def step(self, outcome: StepOutcome) -> None:
        """Report one optimiser step. Collective."""
        trainer = self._trainer
        seconds, own_seconds = trainer.timer.take()
        for stage in _STAGES:
            stages = self._summary.stage_seconds
            stages[stage] = stages.get(stage, 0.0) + seconds.get(stage, 0.0)
        totals = self._collectives.reduce(
            {"tokens": outcome.num_tokens, "computed": outcome.num_computed_tokens}, "sum"
        )
        most = self._collectives.reduce_scalar(outcome.num_tokens, "max")
        metrics = {f"preference/{name}": value for name, value in outcome.metrics.items()}
        metrics |= {f"time/{stage}": seconds.get(stage, 0.0) for stage in _STAGES}
        metrics |= stragglers(own_seconds, _STAGES, collectives=self._collectives)
        metrics |= {
            "throughput/tokens_per_second": totals["tokens"] / max(sum(seconds.values()), 1e-9),
            "batch/padding_fraction": 1.0 - totals["tokens"] / max(totals["computed"], 1),
            "batch/tokens_max_over_mean": most * self._collectives.data_size / max(totals["tokens"], 1),
            "batch/micro_batches": outcome.num_micro_batches,
            "memory/peak_gib": self._collectives.reduce_scalar(peak_memory_bytes() / 2**30, "max"),
            "skipped_steps": trainer.state.skipped_steps,
            "policy_version": trainer.state.policy_version,
        }
        if math.isfinite(outcome.grad_norm):
            metrics["grad_norm"] = outcome.grad_norm
        metrics |= dict(trainer.lr_schedulers.get_metrics())
        if trainer.metrics_processor.should_log(trainer.step):
            trainer.metrics_processor.logger.log(metrics, trainer.step)
            total = trainer.config.training.steps
            shown = metrics | self._evaluation
            if self._collectives.rank == 0:
                left = self._seconds_left()
                logger.info(progress_line(trainer.step, total, metrics=shown, seconds_left=left))
        self._write()

    def finish(self) -> None:
        """Export the model, write and print the summary. Collective.

        Raises:
            TitanRLError: the accuracy rose by less than ``evaluation.minimum_gain``.
        """
        trainer = self._trainer
        if trainer.config.model.export:
            self._summary.paths["export"] = str(trainer.export())
        self._write()
        if self._collectives.rank == 0:
            logger.info(self._summary.text())
        self._check_gain()

    def _seconds_left(self) -> float:
        done = self._trainer.step - self._started_step
        elapsed = time.perf_counter() - self._started
        return elapsed / max(done, 1) * (self._trainer.config.training.steps - self._trainer.step)

    def _write(self) -> None:
        trainer, summary = self._trainer, self._summary
        summary.steps, summary.policy_version = trainer.step, trainer.state.policy_version
        summary.seconds = time.perf_counter() - self._started
        summary.update(trainer.step)
        config = trainer.config
        summary.paths |= {
            "metrics": str(self._folder / config.metrics.save_tb_folder),
            "config": str(self._folder / "config.toml"),
            "summary": str(self._folder / "summary.json"),
        }
        if config.checkpoint.enable:
            summary.paths["checkpoints"] = str(self._folder / config.checkpoint.folder)
        if self._collectives.rank == 0:
            write_json(self._folder / "summary.json", asdict(summary))

    def _check_gain(self) -> None:
        wanted = self._trainer.config.evaluation.minimum_gain
        before, after = self._summary.accuracy_before, self._summary.accuracy_after
        # Rank 0 alone has the evaluations of earlier starts.
        failed = wanted is not None and (before is None or after is None or after - before < wanted)
        if self._collectives.any(failed and self._collectives.rank == 0):
            raise TitanRLError(
                f"The held-out accuracy must rise by at least evaluation.minimum_gain = {wanted}; "
                f"got {before} before and {after} after. Look at optimizer.lr and at the data."
            )
