"""What preference and reward-model training share: one loop over preferences, as a TorchTitan trainer.

What a completion's value is, a log-probability or a reward, is decided by the subclasses in
:mod:`titan_rl.trainers.preference` and :mod:`titan_rl.trainers.reward_model`; what is done with the values is
the loss's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from titan_rl.algorithms.preference_interfaces import CompletionScores, PreferenceInputs, PreferenceLoss
from titan_rl.config.choice import build
from titan_rl.data.preferences import Preference
from titan_rl.errors import RollBackError, StopRequestedError
from titan_rl.functional.expert_load import expert_load
from titan_rl.observability.stages import StageTimer
from titan_rl.policy.reference_cache import ReferenceCache
from titan_rl.resilience.manifest import Facts
from titan_rl.resilience.saving import CheckpointManager
from titan_rl.resilience.state import RunState, seed_process
from titan_rl.titan import waiting
from titan_rl.titan.api import Profiler, Trainer, set_pg_timeouts
from titan_rl.titan.architecture import architecture_of
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.models import ModelSection
from titan_rl.titan.sharded_model import Hidden, ShardedModel
from titan_rl.trainers import assembly, earlier_start, exporting, initial_weights, pair_checks
from titan_rl.trainers.data_loaders import NoDataLoader
from titan_rl.trainers.pair_batches import PairBatch, align_ranks, make_batches
from titan_rl.trainers.pair_data import PairData, PairSplit, deal, num_sides, open_pair_data
from titan_rl.trainers.pair_reporting import PairReporter
from titan_rl.trainers.pair_sections import (
    PairDataSection,
    PairEvaluationSection,
)
from titan_rl.trainers.resilient import ResilientTrainer
from titan_rl.trainers.row_shape import row_shape
from titan_rl.trainers.sections import BatchingSection, ResilienceSection


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one optimiser step did.

    Attributes:
        grad_norm: Global gradient norm before clipping; not finite when the step was skipped.
        metrics: The loss's, over all ranks, by name.
        num_tokens: This rank's tokens without padding.
        num_computed_tokens: This rank's tokens with padding.
        num_micro_batches: Of every rank.
    """

    grad_norm: float
    metrics: dict[str, float]
    num_tokens: int
    num_computed_tokens: int
    num_micro_batches: int


class _Built:
    """Stands for a loss configuration while TorchTitan's trainer builds, which asks it for ``build``."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def build(self, **kwargs: Any) -> Any:
        return self._loss


class PairTrainer(ResilientTrainer):
    """Training on preferences. TorchTitan builds model, optimiser, schedule, checkpointer and metrics."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """TorchTitan's sections, and those that preference and reward-model runs share."""

        # Suppressed: it follows [model], which is settled before tyro reads TorchTitan's command line.
        hf_assets_path: Annotated[str, tyro.conf.Suppress] = ""
        model: ModelSection = field(default_factory=ModelSection)
        """Which model."""
        data: PairDataSection = field(default_factory=PairDataSection)
        """Preferences."""
        batching: BatchingSection = field(default_factory=BatchingSection)
        """How completions become rows."""
        evaluation: PairEvaluationSection = field(default_factory=PairEvaluationSection)
        """Held-out preferences."""
        resilience: ResilienceSection = field(default_factory=ResilienceSection)
        """When to save, to stop and to give up."""
        # TorchTitan types these fields by their base classes; each is built by its own class alone.
        dataloader: NoDataLoader.Config = field(  # pyrefly: ignore[bad-override-mutable-attribute]
            default_factory=NoDataLoader.Config
        )
        checkpoint: CheckpointManager.Config = field(  # pyrefly: ignore[bad-override-mutable-attribute]
            default_factory=lambda: CheckpointManager.Config(last_save_model_only=False)
        )

        def __post_init__(self) -> None:
            Trainer.Config.__post_init__(self)

    # Narrower than TorchTitan declares them, because the configuration above is.
    config: Config  # pyrefly: ignore[bad-override-mutable-attribute]
    loss_fn: PreferenceLoss  # pyrefly: ignore[bad-override]
    reference: ReferenceCache | None = None

    def __init__(self, config: Config) -> None:
        """Build the model with TorchTitan, then everything around it.

        Args:
            config: The whole configuration; ``model_spec`` set.

        Raises:
            ConfigError: the configuration contradicts itself or the files it names.
        """
        pair_checks.check_pair_config(
            config, world_size=assembly.world_size_from_env(), device_type=assembly.device_type()
        )
        self.run_seed = config.debug.seed if config.debug.seed is not None else 0
        # Before TorchTitan's trainer, which writes its own sequence length into the model's configuration.
        self.hf_config = assembly.hf_config(config) if config.model.export else None
        loss_config: Any = config.loss
        loss: PreferenceLoss = build(loss_config)
        self.data = self.open_data(config, loss, seed=self.run_seed)
        self.state = RunState(seed=self.run_seed, data_fingerprint=self.data.fingerprint)
        earlier_start.check_resume(config, self.state, name="pair_state")
        config.loss = _Built(loss)  # pyrefly: ignore[bad-assignment]
        try:
            super().__init__(config)
        finally:
            config.loss = loss_config
        self.policy = ShardedModel.of_trainer(self)
        self.policy.reduce_gradients(config.batching.reduce_gradients)
        self.policy.watch_routers()
        self.collectives = Collectives(self.parallel_dims, self.device)
        if self.config.checkpoint.enable:  # otherwise TorchTitan's checkpointer has no states
            self.checkpointer.states["pair_state"] = self.state
        self.timer = StageTimer(waiting.waited_seconds)
        self.load_initial_weights()
        self.report = PairReporter(self)

    # ------------------------------------------------------------------------- what subclasses decide

    @classmethod
    def open_data(cls, config: Any, loss: PreferenceLoss, *, seed: int) -> PairData:
        """Open and check the preferences of a run.

        Args:
            config: The whole configuration.
            loss: Says what it needs of them.
            seed: The run seed.

        Raises:
            ConfigError: they do not serve this run.
        """
        spec: Any = config.model_spec
        return open_pair_data(
            config.data,
            assets=config.hf_assets_path,
            vocab_size=spec.model.vocab_size,
            row_tokens=config.training.seq_len,
            rows=row_shape(config).rows,
            seed=seed,
            pairs_for=cls.pairs_for(config) if loss.needs.pairs else None,
            with_mismatched=loss.needs.kl_baseline,
        )

    @classmethod
    def pairs_for(cls, config: Any) -> str:
        """What compares pairs, for errors."""
        raise NotImplementedError

    def load_initial_weights(self) -> None:
        """Load the weights that the run starts from."""
        initial_weights.load(self)

    def prepare(self) -> None:
        """What needs the initial weights, before a checkpoint of the run takes their place. Collective."""

    def values(self, batch: PairBatch, hidden: Hidden) -> torch.Tensor:
        """The value of each document ``[N]`` fp32, with grad where the model trains. Collective.

        Args:
            batch: On the device.
            hidden: What the model gives for its micro-batch.
        """
        raise NotImplementedError

    def export(self) -> Path:
        """Write the model in Hugging Face layout. Collective."""
        return exporting.export(self)

    # ----------------------------------------------------------------------------------------- the loop

    def train(self) -> None:
        """Train until ``training.steps`` optimiser steps are done."""
        try:
            with self.timer.stage("reference"):
                self.prepare()
        except StopRequestedError:
            self.give_up()
            return
        self._resume()
        self.report.start()
        if self.state.iteration == 0 or self.state.is_evaluation_left:
            self.evaluate()
        with self.config.profiler.build(
            global_step=self.step, base_folder=self.config.dump_folder
        ) as profiler:
            self._iterate(profiler)
        if self.outcome == "done":
            self.report.finish()

    def _iterate(self, profiler: Profiler) -> None:
        """One optimiser step from top to bottom."""
        count = self.config.data.preferences_per_step
        while self.should_continue_training():
            self.gc_handler.run(self.step + 1)
            seed_process(self.run_seed, self.state.iteration, self.collectives.data_rank)
            drawn = self.data.draw(self.state.cursor, count)
            self.state.cursor += count
            try:
                outcome = self.optimizer_step(drawn)
            except RollBackError:
                self._go_back()
                continue
            self.state.iteration += 1
            if self.is_due(self.config.evaluation.interval_steps):
                self.evaluate()
            self.report.step(outcome)
            with self.timer.stage("checkpoint"):
                is_last = self.step >= self.config.training.steps
                self.checkpointer.save(self.step, last_step=is_last)
            profiler.step()

    def optimizer_step(self, drawn: Sequence[Preference]) -> StepOutcome:
        """Train on the preferences of one step: forward-backward over micro-batches, clip, step.

        Args:
            drawn: Of all ranks.

        Raises:
            NonFiniteError: more steps in a row were skipped than ``resilience.max_skipped_steps``.
        """
        self.step += 1
        with self.timer.stage("train"):
            batches = self.make_batches(drawn)
            baseline = self.kl_baseline(self.data.train, drawn)
            self.optimizers.zero_grad(set_to_none=True)
            parts = self.forward_backward(batches, counts=num_sides(drawn), baseline=baseline)
            grad_norm = self.policy.clip_grad_norm(self.config.training.max_norm)
            load = expert_load(self.policy.take_router_load())
            metrics = self.reduce(parts) | {f"moe_{name}": value for name, value in load.items()}
            cause = self.bad_steps.guard.fault(grad_norm)
            if cause is None:
                self.checkpointer.maybe_wait_for_staging()
                self.optimizers.step()
                self.lr_schedulers.step()
                self.state.policy_version += 1
                self.bad_steps.applied(grad_norm)
            else:
                self.state.skipped_steps += 1
                losses = [float(part["loss/mean"]) for part in parts]
                self.bad_steps.refuse(
                    cause, losses=losses, tensors=lambda number: batches[number].micro_batch.tensors()
                )
        tokens = sum(batch.micro_batch.num_tokens for batch in batches)
        self.ntokens_seen += tokens
        return StepOutcome(
            grad_norm=grad_norm,
            metrics=metrics,
            num_tokens=tokens,
            num_computed_tokens=sum(batch.micro_batch.input_ids.numel() for batch in batches),
            num_micro_batches=len(batches),
        )

    def forward_backward(
        self, batches: Sequence[PairBatch], *, counts: tuple[int, int], baseline: torch.Tensor | None
    ) -> list[dict[str, torch.Tensor]]:
        """Accumulate the gradient of the step's loss over this rank's micro-batches. Collective.

        FSDP sums gradients over ranks and autograd over micro-batches; each micro-batch's loss is divided by
        the global count, so the sum is the global mean.

        Args:
            batches: This rank's, as many as every other rank has.
            counts: Chosen and rejected completions of the step, over all ranks.
            baseline: The KL baseline, if the loss has one.

        Returns:
            The loss's metrics of each micro-batch.
        """

        def loss(number: int, hidden: Hidden) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            batch = batches[number]
            output = self.loss_fn(self._inputs(batch, self.values(batch, hidden), counts, baseline))
            return output.loss, output.metrics

        return self.policy.forward_backward([batch.micro_batch for batch in batches], loss)

    def evaluate(self) -> dict[str, float]:
        """Score held-out preferences and report the result; empty when nothing is held out. Collective.

        It is empty too when the run is asked to stop, and then left to the start that continues the run.
        """
        drawn = self.data.held_out_preferences(self.config.evaluation.num_preferences)
        if not drawn or self.data.held_out is None:
            return {}
        self.state.is_evaluation_left = 1
        try:
            with self.timer.stage("evaluate"):
                metrics = self._evaluate(drawn, self.data.held_out)
        except StopRequestedError:
            return {}
        self.state.is_evaluation_left = 0
        self.report.evaluation(metrics, len(drawn))
        return metrics

    def _evaluate(self, drawn: Sequence[Preference], split: PairSplit) -> dict[str, float]:
        batches = self.make_batches(drawn)
        baseline = self.kl_baseline(split, drawn, may_stop=True)
        parts = []
        for batch in self.unless_stopping(batches):
            (values,) = self.frozen_values([batch])
            with torch.no_grad():
                inputs = self._inputs(batch, values, num_sides(drawn), baseline)
                parts.append(self.loss_fn(inputs).metrics)
        return self.reduce(parts)

    # ------------------------------------------------------------------------------------------ details

    def make_batches(self, drawn: Sequence[Preference]) -> list[PairBatch]:
        """Pack this rank's share of some preferences, aligned over ranks. Collective."""
        collectives, shape = self.collectives, row_shape(self.config)
        attention_cost = architecture_of(self.model_config).attention_cost
        batches = make_batches(
            deal(drawn, self.data.encode, attention_cost=attention_cost, collectives=collectives),
            row_tokens=self.config.training.seq_len,
            rows=shape.rows,
            length_multiple=shape.length_multiple,
            pad_to="token_budget" if shape.is_fixed else self.config.batching.pad_to,
        )
        return align_ranks(batches, collectives=collectives, device=self.device, empty_shape=shape.empty)

    def frozen_values(self, batches: Sequence[PairBatch]) -> list[torch.Tensor]:
        """:meth:`values` of some batches, without grad. Collective."""

        def score(number: int, hidden: Hidden) -> torch.Tensor:
            # One row of all documents' values: what a scorer gives has the shape of its micro-batch.
            rows = torch.zeros_like(batches[number].micro_batch.positions, dtype=torch.float32)
            values = self.values(batches[number], hidden)
            rows.view(-1)[: len(values)] = values
            return rows

        rows = self.policy.scores([batch.micro_batch for batch in batches], score)
        return [row.view(-1)[: len(batch.keys)] for row, batch in zip(rows, batches, strict=True)]

    def kl_baseline(
        self, split: PairSplit, drawn: Sequence[Preference], *, may_stop: bool = False
    ) -> torch.Tensor | None:
        """Mean log-ratio of policy and reference on completions of other prompts, at least 0. Collective.

        One number for the whole step, so that it depends on neither micro-batches nor ranks.

        Args:
            split: Where the preferences are from.
            drawn: Of all ranks.
            may_stop: Whether to give up when the run is asked to stop.

        Raises:
            StopRequestedError: it was, on every rank.
        """
        if not self.loss_fn.needs.kl_baseline:
            return None
        total, count = 0.0, 0
        batches = self.make_batches([split.mismatched(preference) for preference in drawn])
        for batch in self.unless_stopping(batches) if may_stop else batches:
            (values,) = self.frozen_values([batch])
            total += float((values - self._ref_logprobs(batch)).sum())
            count += len(batch.keys)
        sums = self.collectives.reduce({"total": total, "count": count}, "sum")
        mean = max(sums["total"] / max(sums["count"], 1), 0.0)
        return torch.tensor(mean, dtype=torch.float32, device=self.device)

    def reduce(self, parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Add up means and take maxima over micro-batches and ranks. Collective.

        Of pairs, ``margin_square`` becomes ``margin_std``, the deviation of the margin over all of them.
        """
        columns: dict[str, list[float]] = {}
        for part in parts:
            for name, value in part.items():
                columns.setdefault(name, []).append(float(value))
        sums = {n.removesuffix("/mean"): math.fsum(v) for n, v in columns.items() if n.endswith("/mean")}
        maxima = {n.removesuffix("/max"): max(v) for n, v in columns.items() if n.endswith("/max")}
        reduced = self.collectives.reduce(sums, "sum") | self.collectives.reduce(maxima, "max")
        square = reduced.pop("margin_square", None)
        if square is not None:
            reduced["margin_std"] = math.sqrt(max(square - reduced["margin"] ** 2, 0.0))
        return reduced

    def _inputs(
        self,
        batch: PairBatch,
        values: torch.Tensor,
        counts: tuple[int, int],
        baseline: torch.Tensor | None,
    ) -> PreferenceInputs:
        reference = self._ref_logprobs(batch) if self.loss_fn.needs.reference else None

        def of(side: torch.Tensor) -> CompletionScores:
            return CompletionScores(
                values=values[side],
                lengths=batch.lengths[side],
                ref_logprobs=None if reference is None else reference[side],
            )

        return PreferenceInputs(
            chosen=of(batch.chosen),
            rejected=of(batch.rejected),
            margins=batch.margins,
            num_chosen=counts[0],
            num_rejected=counts[1],
            kl_baseline=baseline,
        )

    def _ref_logprobs(self, batch: PairBatch) -> torch.Tensor:
        if self.reference is None:
            raise ValueError("A loss that needs a reference needs a trainer that has one.")
        return torch.tensor(self.reference.lookup(batch.keys), dtype=torch.float32, device=self.device)

    def has_work_left(self) -> bool:
        """Whether an evaluation was given up."""
        return bool(self.state.is_evaluation_left)

    def facts(self) -> Facts:
        """The accuracy on held-out preferences, and the counters."""
        return Facts(
            trainer=self.kind,
            held_out=self.report.held_out(self.step),
            state={"pair_state": self.state.numbers()},
        )

    def _resume(self) -> None:
        """Restore the newest checkpoint of this run, if there is one."""
        self.checkpointer.load(step=self.config.checkpoint.load_step)
        set_pg_timeouts(timedelta(seconds=self.config.comm.train_timeout_seconds), self.parallel_dims)

    def _go_back(self) -> None:
        """Go on from the newest checkpoint, with the preferences after those that have been drawn."""
        cursor, skipped = self.state.cursor, self.state.skipped_steps
        self.bad_steps.go_back()
        self.state.cursor, self.state.skipped_steps = cursor, skipped
        self.report.forget_later_steps()
