"""What a run reports: metrics, progress, recorded rollouts, evaluations, the summary and the export."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from titan_rl.batching.balance import cost
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.errors import TitanRLError
from titan_rl.observability.progress import progress_line
from titan_rl.observability.recorder import RolloutRecorder
from titan_rl.observability.summary import RunSummary, read_json, steps_in, write_json
from titan_rl.resilience.journal import Journal, parameters_digest
from titan_rl.resilience.manifest import HeldOut
from titan_rl.rollout.evaluation import total_up
from titan_rl.rollout.source import Taken
from titan_rl.titan.api import logger
from titan_rl.titan.device import peak_memory_bytes
from titan_rl.trainers import assembly
from titan_rl.trainers.deal import Deal
from titan_rl.trainers.exporting import export, export_adapter
from titan_rl.trainers.model_reward import PART
from titan_rl.trainers.optimization import StepBatch, StepResult
from titan_rl.trainers.slow_ranks import stragglers
from titan_rl.types import Group

if TYPE_CHECKING:
    from titan_rl.trainers.rl import RLTrainer

_BALANCED = ("rows", "tokens", "cost")
_STAGES = ("generate", "score", "train", "sync", "evaluate", "checkpoint")


def time_metrics(
    seconds: Mapping[str, float], *, elapsed: float, tokens: float, generated: float, trained: float
) -> dict[str, float]:
    """Where the time of an iteration went, and tokens per second.

    Args:
        seconds: By stage.
        elapsed: Seconds of the iteration, those between the stages too.
        tokens: Of prompts and completions, all ranks.
        generated: Of completions, all ranks.
        trained: Trained, all ranks and steps.
    """
    sampling = seconds.get("generate", 0.0) + seconds.get("evaluate", 0.0)
    training = seconds.get("score", 0.0) + seconds.get("train", 0.0)
    return {f"time/{stage}": seconds.get(stage, 0.0) for stage in _STAGES} | {
        "time/overhead": elapsed - math.fsum(seconds.values()),
        "throughput/tokens_per_second": tokens / elapsed,
        "throughput/generated_tokens_per_second": generated / max(seconds.get("generate", 0.0), 1e-9),
        "throughput/trained_tokens_per_second": trained / max(seconds.get("train", 0.0), 1e-9),
        "throughput/generator_idle_fraction": 1.0 - sampling / elapsed,
        "throughput/trainer_idle_fraction": 1.0 - training / elapsed,
    }


class Reporter:
    """Collects, reduces over ranks, and writes. Its collective methods are called on every rank.

    Attributes:
        reward: Mean over the rollouts of the last iteration; None before the first.
    """

    def __init__(self, trainer: RLTrainer, *, folder: Path | None = None) -> None:
        """Bind a trainer whose collaborators are built.

        Args:
            trainer: Whose numbers.
            folder: Where files go; the run's ``dump_folder`` by default.
        """
        self._trainer, self._collectives = trainer, trainer.collectives
        self._folder = folder or Path(trainer.config.dump_folder)
        self._recorder = RolloutRecorder(self._folder / "rollouts", self._collectives.rank)
        self._summary = RunSummary()
        self._packed: dict[str, float] = {}
        self._measured: dict[str, float] = {}
        self._score: float | None = None
        self.reward: float | None = None

    def start(self) -> None:
        """After the checkpoint is restored: forget what a resumed run executes again."""
        trainer = self._trainer
        self._started_step, self._started = trainer.step, time.perf_counter()
        stored = read_json(self._folder / "summary.json")  # on every rank: all judge the gain at the end
        self._summary.scores = {s: float(v) for s, v in steps_in(stored, "scores").items()}
        self._summary.num_evaluated = int(stored.get("num_evaluated", 0))
        self.forget_later_steps()

    def forget_later_steps(self) -> None:
        """Drop what was recorded of steps after the present one, which are done again. Collective."""
        trainer = self._trainer
        self._packed, self._measured = {}, {}
        if self._collectives.rank == 0:
            self._recorder.drop_after("train", trainer.state.iteration)
            self._recorder.drop_after("evaluation", trainer.step)
        self._summary.scores = {s: v for s, v in self._summary.scores.items() if s <= trainer.step}
        self._score = next(reversed(self._summary.scores.values()), None)
        self._collectives.barrier()
        self._journal = Journal(self._folder, collectives=self._collectives, resumed_step=trainer.step)

    def held_out(self, step: int) -> HeldOut | None:
        """The score measured at a step, if any was."""
        score = self._summary.scores.get(step)
        return None if score is None else HeldOut("evaluation/score", score)

    def record(self, taken: Taken, advantages: Mapping[tuple[int, int], float]) -> None:
        """Write this rank's rollouts of the iteration, with the advantages of those that are trained on."""
        groups = [*taken.groups, *taken.dropped] if self._collectives.is_first_of_its_rows else []
        self._recorder.record("train", self._trainer.state.iteration + 1, groups, advantages)

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Remember metrics over all ranks, to be reported with the iteration."""
        self._measured |= metrics

    def mean_kl(self, results: Sequence[StepResult]) -> float | None:
        """Mean KL to the reference per token in this iteration; None where nothing measured it."""
        values = [r.metrics["loss/reference_kl"] for r in results if "loss/reference_kl" in r.metrics]
        return self._measured.get("reward/kl_mean", math.fsum(values) / len(values) if values else None)

    def packed(self, micro_batches: Sequence[MicroBatch], deal: Deal, *, attention_cost: float) -> None:
        """Remember this rank's share of a step.

        Args:
            micro_batches: Of the step, empty ones included.
            deal: Of their samples.
            attention_cost: As for :func:`titan_rl.batching.balance.cost`.
        """
        tokens = sum(batch.num_tokens for batch in micro_batches)
        attended = sum(batch.num_attended for batch in micro_batches)
        share = {
            "rows": sum(bool(of_row) for batch in micro_batches for of_row in batch.document_lengths),
            "tokens": tokens,
            "cost": cost(tokens, attended, attention_cost),
            "positions": sum(batch.input_ids.numel() for batch in micro_batches),
            "held": sum(len(sample.token_ids) for sample in deal.held),
            "moved": deal.moved_tokens,
        }
        self._packed = {name: self._packed.get(name, 0) + value for name, value in share.items()}

    def evaluation(self, groups: Sequence[Group]) -> dict[str, float]:
        """Reduce and report one evaluation.

        Returns:
            The metrics, over all ranks; empty when nothing was scored.
        """
        trainer = self._trainer
        section = trainer.config.evaluation
        self._recorder.record(
            "evaluation", trainer.step, groups if self._collectives.is_first_of_its_rows else []
        )
        totals = self._collectives.reduce(
            asdict(total_up(groups, pass_threshold=section.pass_threshold)), "sum"
        )
        if not totals["num_prompts"]:
            return {}
        scored, prompts = totals["num_scored"], totals["num_prompts"]
        metrics = {
            "evaluation/score": totals["num_passed"] / scored,
            "evaluation/reward_mean": totals["reward"] / scored,
            f"evaluation/pass_at_{section.samples_per_prompt}": totals["pass_at_k"] / prompts,
            "evaluation/completion_tokens_mean": totals["num_tokens"] / scored,
            "evaluation/failed_rewards": totals["num_failed"],
        }
        self._score = metrics["evaluation/score"]
        self._summary.num_evaluated = int(prompts)
        self._summary.scores[trainer.step] = self._score
        trainer.metrics_processor.logger.log(metrics, trainer.step)
        if self._collectives.rank == 0:
            logger.info(
                "step %d  held-out score %.3f on %d prompts (mean reward %.3f)",
                trainer.step,
                self._score,
                int(prompts),
                metrics["evaluation/reward_mean"],
            )
        return metrics

    def write_evaluation(self, metrics: Mapping[str, float]) -> Path:
        """Write one evaluation, what was scored and how, as ``step-NNNNNN.json``.

        Args:
            metrics: From :meth:`evaluation`.

        Returns:
            The file.
        """
        trainer, section = self._trainer, self._trainer.config.evaluation
        path = self._folder / f"step-{trainer.step:06d}.json"
        content = {
            "step": trainer.step,
            "policy_version": trainer.state.policy_version,
            "num_prompts": self._summary.num_evaluated,
            "samples_per_prompt": section.samples_per_prompt,
            "temperature": section.temperature,
            "pass_threshold": section.pass_threshold,
        } | {name.removeprefix("evaluation/"): value for name, value in metrics.items()}
        if self._collectives.rank == 0:
            write_json(path, content)
        return path

    def iteration(
        self,
        taken: Taken,
        batches: Sequence[StepBatch],
        results: Sequence[StepResult],
    ) -> None:
        """Reduce and report one iteration, and enter it in the journal."""
        trainer = self._trainer
        self._enter_in_journal(taken, results)
        metrics = self._rollout_metrics(taken)
        self.reward = metrics["reward/mean"]
        metrics |= self._measured
        self._measured = {}  # what the next iteration does not measure is not reported again
        metrics |= self._step_metrics(results)
        tokens = metrics.pop("tokens")
        metrics |= {
            "throughput/trained_tokens": sum(batch.num_loss_tokens for batch in batches),
            "throughput/computed_tokens": sum(batch.num_computed_tokens for batch in batches),
            "weight_sync/probe_difference": trainer.last_push.probe_difference,
            "weight_sync/bytes": trainer.last_push.num_bytes,
            "weight_sync/gb_per_second": trainer.last_push.num_bytes / 1e9 / trainer.last_push_seconds,
            "memory/peak_gib": self._collectives.reduce_scalar(peak_memory_bytes() / 2**30, "max"),
            "batch/micro_batches": sum(len(batch.micro_batches) for batch in batches),
            "policy_version": trainer.state.policy_version,
        } | self._balance()
        elapsed = trainer.timer.elapsed()
        seconds, own_seconds = trainer.timer.take()
        metrics |= stragglers(own_seconds, _STAGES, collectives=self._collectives)
        metrics |= time_metrics(
            seconds,
            elapsed=elapsed,
            tokens=tokens,
            generated=metrics["rollout/completion_tokens"],
            trained=metrics["throughput/trained_tokens"],
        )
        self._add_to_summary(seconds, tokens, int(metrics["rollout/completion_tokens"]))
        if trainer.metrics_processor.should_log(trainer.step):
            trainer.metrics_processor.logger.log(metrics, trainer.step)
        shown = metrics if self._score is None else metrics | {"evaluation/score": self._score}
        if self._collectives.rank == 0:
            left = self._seconds_left()
            logger.info(progress_line(trainer.step, self._total, metrics=shown, seconds_left=left))
        self._write_summary()

    def finish(self) -> None:
        """Export the policy, write and print the summary. Collective."""
        trainer = self._trainer
        section = trainer.config.model
        if section.export:
            self._summary.paths["export"] = str(export(trainer))
        if section.export and trainer.config.lora is not None:
            self._summary.paths["adapter"] = str(export_adapter(trainer))
        self._write_summary()
        if self._collectives.rank == 0:
            logger.info(self._summary.text())
        self._check_gain()

    # -------------------------------------------------------------------------------------------------

    def _enter_in_journal(self, taken: Taken, results: Sequence[StepResult]) -> None:
        trainer, digest = self._trainer, None
        if trainer.config.resilience.journal_parameters:
            digest = parameters_digest(self._weights(), is_computed=self._collectives.rank == 0)
        self._journal.iteration(
            step=trainer.step,
            policy_version=trainer.state.policy_version,
            groups=[*taken.groups, *taken.dropped],
            losses=[result.metrics.get("loss/loss", math.nan) for result in results],
            grad_norms=[result.grad_norm for result in results],
            parameters=digest,
        )

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All that is trained, gathered one tensor at a time. Collective."""
        yield from self._trainer.policy.full_state()
        if self._trainer.critic is not None:
            yield from ((f"critic.{name}", full) for name, full in self._trainer.critic.model.full_state())

    @property
    def _total(self) -> int:
        return self._trainer.config.training.steps

    def _rollout_metrics(self, taken: Taken) -> dict[str, float]:
        groups, stats = [*taken.groups, *taken.dropped], taken.stats
        rewards = [r.reward for g in groups for r in g.rollouts if r.reward is not None]
        parts: dict[str, float] = {}
        for reward in rewards:
            for name, value in reward.parts.items():
                parts[f"part/{name}"] = parts.get(f"part/{name}", 0.0) + value
        names = [spec.name for spec in assembly.reward_specs(self._trainer.config.reward)]
        names += [PART] if self._trainer.model_reward is not None else []
        totals = [reward.total for reward in rewards]
        equal = sum(len({r.reward.total for r in g.rollouts if r.reward is not None}) <= 1 for g in groups)
        sums = {
            "rewards": len(totals),
            "reward": math.fsum(totals),
            "square": math.fsum(t * t for t in totals),
            "rollouts": stats.num_rollouts,
            "tokens": stats.num_tokens,
            "prompt_tokens": stats.num_prompt_tokens,
            "truncated": stats.num_truncated,
            "failed": sum(stats.reward_failures.values()),
            "groups": len(groups),
            "equal": equal,
            "dropped": len(taken.dropped),
        } | {f"part/{name}": parts.get(f"part/{name}", 0.0) for name in names}
        total = self._collectives.reduce(sums, "sum")
        count, rollouts = max(total["rewards"], 1), max(total["rollouts"], 1)
        mean = total["reward"] / count
        metrics = {
            "reward/mean": mean,
            "reward/std": math.sqrt(max(total["square"] / count - mean**2, 0.0)),
            "reward/failed_fraction": total["failed"] / rollouts,
            "reward/equal_groups_fraction": total["equal"] / max(total["groups"], 1),
            "rollout/dropped_groups": total["dropped"],
            "rollout/rounds": taken.num_rounds,
            "rollout/completion_tokens": total["tokens"],
            "rollout/completion_tokens_mean": total["tokens"] / rollouts,
            "rollout/prompt_tokens_mean": total["prompt_tokens"] / rollouts,
            "rollout/truncated_fraction": total["truncated"] / rollouts,
            "time/reward_wait": stats.reward_seconds,
            "tokens": total["tokens"] + total["prompt_tokens"],
        }
        return metrics | {f"reward_part/{name}": total[f"part/{name}"] / count for name in names}

    def _step_metrics(self, results: Sequence[StepResult]) -> dict[str, float]:
        """Mean over the iteration's steps; the mismatch is of the first, with the generator's weights."""
        trainer = self._trainer
        metrics: dict[str, float] = {}
        for name in sorted({name for result in results for name in result.metrics}):
            values = [r.metrics[name] for r in results if name in r.metrics]
            extreme = {"_max": max, "_min": min}.get(name[-4:])
            metrics[name] = math.fsum(values) / len(values) if extreme is None else extreme(values)
        first = results[0].metrics
        if "loss/mismatch_abs" in first:
            trainer.state.mean_mismatch = first["loss/mismatch_abs"]
            metrics["loss/mismatch_abs"], metrics["loss/mismatch_abs_max"] = (
                first["loss/mismatch_abs"],
                first["loss/mismatch_abs_max"],
            )
        norms = [r.grad_norm for r in results if math.isfinite(r.grad_norm)]
        if norms:
            metrics["grad_norm"] = math.fsum(norms) / len(norms)
        metrics["skipped_steps"] = trainer.state.skipped_steps
        if trainer.critic is not None:
            metrics["critic/skipped_steps"] = trainer.critic.skipped_steps
        return metrics | dict(trainer.lr_schedulers.get_metrics())

    def _balance(self) -> dict[str, float]:
        """How evenly the work of the iteration lies on the data-parallel ranks, and what of it is padding."""
        local, self._packed = self._packed, {}
        total = self._collectives.reduce(local, "sum")
        most = self._collectives.reduce({name: local[name] for name in _BALANCED}, "max")
        size = self._collectives.data_size
        return {
            f"batch/{name}_max_over_mean": most[name] * size / max(total[name], 1) for name in _BALANCED
        } | {
            "batch/moved_tokens_fraction": total["moved"] / max(total["held"], 1),
            "batch/padding_fraction": 1.0 - total["tokens"] / max(total["positions"], 1),
        }

    def _seconds_left(self) -> float:
        done = self._trainer.step - self._started_step
        elapsed = time.perf_counter() - self._started
        return elapsed / max(done, 1) * (self._total - self._trainer.step)

    def _add_to_summary(self, seconds: dict[str, float], tokens: float, generated: int) -> None:
        summary = self._summary
        for stage in _STAGES:
            summary.stage_seconds[stage] = summary.stage_seconds.get(stage, 0.0) + seconds.get(stage, 0.0)
        summary.stage_tokens["generate"] = summary.stage_tokens.get("generate", 0) + generated
        summary.stage_tokens["train"] = summary.stage_tokens.get("train", 0) + int(tokens)

    def _write_summary(self) -> None:
        trainer, summary = self._trainer, self._summary
        summary.steps, summary.policy_version = trainer.step, trainer.state.policy_version
        summary.seconds = time.perf_counter() - self._started
        summary.score_before = summary.scores.get(0)
        summary.score_after = summary.scores.get(trainer.step)
        config = trainer.config
        summary.paths |= {
            "rollouts": str(self._folder / "rollouts"),
            "metrics": str(self._folder / config.metrics.save_tb_folder),
            "config": str(self._folder / "config.toml"),
            "summary": str(self._folder / "summary.json"),
        }
        if config.checkpoint.enable:
            summary.paths["checkpoints"] = str(self._folder / config.checkpoint.folder)
        if self._collectives.rank == 0:
            summary.write(self._folder / "summary.json")

    def _check_gain(self) -> None:
        wanted = self._trainer.config.evaluation.minimum_gain
        before, after = self._summary.score_before, self._summary.score_after
        if wanted is None:
            return
        if before is None or after is None or after - before < wanted:
            raise TitanRLError(
                f"The held-out score must rise by at least evaluation.minimum_gain = {wanted}; "
                f"got {before} before and {after} after. Look at the rollouts in {self._folder / 'rollouts'}."
            )
