"""The RL trainer: TorchTitan's trainer with rollouts for data. The loop is :meth:`RLTrainer.train`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from titan_rl.algorithms import grpo
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import derive_needs
from titan_rl.algorithms.refill import RefillSection
from titan_rl.algorithms.registries import ADVANTAGES
from titan_rl.algorithms.shaping import ShapingSection
from titan_rl.batching.micro_batch import MicroBatch, padding_fraction
from titan_rl.batching.pack import pack
from titan_rl.batching.steps import split_into_steps
from titan_rl.config.choice import Choice, build
from titan_rl.errors import ConfigError, NonFiniteError, TitanRLError
from titan_rl.generation.registry import GENERATORS
from titan_rl.generation.vllm import VllmGenerator
from titan_rl.observability.stages import StageTimer
from titan_rl.policy.critic import Critic, build_critic
from titan_rl.policy.token_scores import LogprobScorer
from titan_rl.resilience.state import RunState, seed_process
from titan_rl.rewards.pool import RewardPool
from titan_rl.rollout.evaluation import EvaluationSection
from titan_rl.rollout.permutation import permute_rewards
from titan_rl.rollout.samples import to_samples
from titan_rl.rollout.source import Taken
from titan_rl.titan.api import CheckpointManager, Profiler, Trainer, clip_grad_norm_, logger, set_pg_timeouts
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.models import ModelSection
from titan_rl.trainers import assembly, checks, initial_weights
from titan_rl.trainers.credit import Credit, mean_by_rollout
from titan_rl.trainers.critic_training import CriticTraining
from titan_rl.trainers.data_loaders import NoDataLoader
from titan_rl.trainers.optimization import (
    StepBatch,
    StepResult,
    align_ranks,
    forward_backward,
    reduce_metrics,
    score_batch,
)
from titan_rl.trainers.reporting import Reporter
from titan_rl.trainers.sections import (
    AlgorithmSection,
    BatchingSection,
    DataSection,
    ReferenceSection,
    ResilienceSection,
    SamplingSection,
)
from titan_rl.types import Group, Sample
from titan_rl.weight_sync.push import WeightSync, WeightSyncSection


class RLTrainer(Trainer):
    """Reinforcement learning as a TorchTitan trainer.

    TorchTitan builds the sharded policy, optimiser, schedule, checkpointer and metrics. Added after it: the
    generator, the rewards, the reference, and the loop.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """TorchTitan's sections, and ours."""

        # Suppressed: it follows [model], which is settled before tyro reads TorchTitan's command line.
        hf_assets_path: Annotated[str, tyro.conf.Suppress] = ""
        model: ModelSection = field(default_factory=ModelSection)
        """Which model."""
        algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
        """Which composition, and how many optimiser steps per iteration."""
        advantage: Annotated[object, Choice(ADVANTAGES)] = field(
            default_factory=lambda: grpo.preset().advantage
        )
        """Rewards of a group to advantages."""
        shaping: ShapingSection = field(default_factory=ShapingSection)
        """What is done to rewards before the advantage, and to advantages after it."""
        # TorchTitan types these fields by their base classes; each is built by its own class alone.
        loss: PolicyLoss.Config = field(  # pyrefly: ignore[bad-override]
            default_factory=lambda: grpo.preset().loss
        )
        """Ratio, surrogate, correction, aggregation and KL."""
        data: DataSection = field(default_factory=DataSection)
        """Prompts."""
        reward: list[dict[str, Any]] = field(default_factory=list)
        """``[[reward]]`` tables: ``type``, ``weight``, ``name`` and the reward's own keys."""
        reward_workers: RewardPool.Config = field(default_factory=RewardPool.Config)
        """Worker processes that compute rewards, per rank."""
        sampling: SamplingSection = field(default_factory=SamplingSection)
        """How completions are drawn."""
        refill: RefillSection = field(default_factory=RefillSection)
        """Whether groups that teach nothing are replaced."""
        generator: Annotated[object, Choice(GENERATORS)] = field(default_factory=VllmGenerator.Config)
        """The engine that samples."""
        weight_sync: WeightSyncSection = field(default_factory=WeightSyncSection)
        """Bounds of the handshake."""
        batching: BatchingSection = field(default_factory=BatchingSection)
        """How samples become rows."""
        reference: ReferenceSection = field(default_factory=ReferenceSection)
        """The frozen model of the KL term."""
        critic: Critic.Config | None = None
        """The value model of an advantage that needs one; its defaults count without the table."""
        evaluation: EvaluationSection = field(default_factory=EvaluationSection)
        """Scores on held-out prompts."""
        resilience: ResilienceSection = field(default_factory=ResilienceSection)
        """When to give up."""
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
    loss_fn: PolicyLoss  # pyrefly: ignore[bad-override]
    checkpointer: CheckpointManager  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: Config) -> None:
        """Build the policy with TorchTitan, then everything around it.

        Args:
            config: The whole configuration; ``model_spec`` set.

        Raises:
            ConfigError: the configuration contradicts itself or the files it names.
        """
        checks.check_config(
            config, world_size=assembly.world_size_from_env(), device_type=assembly.device_type()
        )
        self.run_seed = config.debug.seed if config.debug.seed is not None else 0
        # Before TorchTitan's trainer, which writes its own sequence length into the model's configuration.
        self.hf_config = assembly.hf_config(config) if assembly.needs_hf_config(config) else None
        self.advantage = build(config.advantage)
        data = assembly.open_data(config, self.run_seed)
        super().__init__(config)
        self.policy = self.model_parts[0]
        # The head is applied to trained tokens only, in chunks.
        self.policy._skip_lm_head = True  # pyrefly: ignore[bad-argument-type]  # typed as any nn.Module
        self.collectives = Collectives(self.parallel_dims, self.device)
        self.needs = derive_needs(
            self.advantage, self.loss_fn, steps_per_iteration=config.algorithm.steps_per_iteration
        )
        self.state = RunState(seed=self.run_seed, data_fingerprint=data.fingerprint)
        if self.config.checkpoint.enable:  # otherwise TorchTitan's checkpointer has no states
            self.checkpointer.states["rl_state"] = self.state
        initial_weights.load(self)
        self.reference = self._reference_scorer()
        self.old_scorer = self._scorer(self.policy)
        self.critic = self._critic_training()
        self.data = data
        self.generator = assembly.build_generator(self, data)
        self.rewards = assembly.build_rewards(config)
        self.runner = assembly.build_runner(self, data)
        self.source = assembly.build_source(self, data)
        self.credit = Credit(
            self.advantage,
            config.shaping,
            kl_in_reward=self.loss_fn.kl if self.needs.reference and self.loss_fn.kl.is_in_reward else None,
            max_tokens=config.sampling.max_tokens,
            collectives=self.collectives,
        )
        self.sync = WeightSync(
            config.weight_sync,
            stream=assembly.weight_stream(self),
            generator=self.generator,
            policy_logprobs=self._probe_logprobs,
            probe=data.probe(),
            collectives=self.collectives,
        )
        self.report = Reporter(self)

    def train(self) -> None:
        """Run iterations until ``training.steps`` optimiser steps are done."""
        self._resume()
        self.report.start()
        self.sync_weights()
        if self.state.iteration == 0:
            self.evaluate()
        with self.config.profiler.build(
            global_step=self.step, base_folder=self.config.dump_folder
        ) as profiler:
            self._iterate(profiler)
        self.report.finish()

    def _iterate(self, profiler: Profiler) -> None:
        """The loop: one iteration from top to bottom."""
        while self.should_continue_training():
            self.gc_handler.run(self.state.iteration + 1)
            seed_process(self.run_seed, self.state.iteration, self.collectives.rank)
            taken = self.generate()
            batches = self.make_batches(taken)
            results = [self.update(batch) for batch in batches]
            self.state.iteration += 1
            self._adapt_kl_coefficient(results, batches)
            if self.critic is not None:
                self.report.credit(self.critic.end_iteration(batches))
            self.sync_weights()
            if self._evaluation_is_due():
                self.evaluate()
            self.report.iteration(taken, batches, results)
            with self.timer.stage("checkpoint"):
                is_last = self.step >= self.config.training.steps
                self.checkpointer.save(self.step, last_step=is_last)
            profiler.step()

    def evaluate_only(self) -> None:
        """Restore the newest checkpoint and score held-out prompts; nothing is trained.

        Files go to ``<dump_folder>/evaluation``; those of the training run stay as they are.

        Raises:
            ConfigError: nothing is held out.
        """
        folder = Path(self.config.dump_folder) / "evaluation"
        self.report = Reporter(self, folder=folder)
        self._resume()
        self.sync_weights()
        metrics = self.evaluate()
        if not metrics:
            raise ConfigError(
                "data.source",
                "hold out prompts to be evaluated",
                type(self.config.data.source).__qualname__,
                "Set num_held_out, held_out_fraction or a held-out file or split.",
            )
        path = self.report.write_evaluation(metrics)
        weights = f"the checkpoint of step {self.step}" if self.step else "the initial weights"
        shown = "  ".join(f"{name.removeprefix('evaluation/')} {v:.4g}" for name, v in metrics.items())
        logger.info("Evaluated %s: %s\n  written to %s", weights, shown, path)

    # ------------------------------------------------------------------ stages of an iteration, in order

    def generate(self) -> Taken:
        """Draw the next prompts, and sample and score their rollouts, on this rank's share."""
        with self.timer.stage("generate"):
            self.generator.wake_up()
            taken = self.source.take(self.state.cursor, self.state.policy_version)
            self.generator.sleep()
        self.state.cursor += taken.num_drawn
        if self.config.algorithm.permute_rewards:
            permute_rewards(taken.groups, self.run_seed)
        self._check_rewards(taken)
        return taken

    def make_batches(self, taken: Taken) -> list[StepBatch]:
        """Cut samples, pack them for each optimiser step of the iteration, score them, assign advantages."""
        groups = [group for group in taken.groups if self._is_trainable(group)]
        num_dropped = len(taken.dropped) + len(taken.groups) - len(groups)
        self.state.dropped_groups += int(self.collectives.reduce_scalar(num_dropped, "sum"))
        shaping, per_rollout = self.config.shaping, {}
        if not self.credit.needs_scores:
            per_rollout = self.credit.of_rollouts(groups)
        samples = to_samples(groups, mask_truncated=shaping.mask_truncated)
        steps = split_into_steps(samples, self.config.algorithm.steps_per_iteration)
        batches = [self._batch([samples[i] for i in chosen], per_rollout) for chosen in steps]
        with self.timer.stage("score"):
            old = self._choose_old_scorer(batches)
            for batch in batches:
                score_batch(batch, old=old, reference=self.reference)
                if self.critic is not None:
                    self.critic.score(batch)
            if self.credit.needs_scores:
                self.report.credit(self.credit.assign(groups, batches))
                per_rollout = mean_by_rollout(batches)
        self.report.record(taken, per_rollout)
        return batches

    def update(self, batch: StepBatch) -> StepResult:
        """Train on one batch: the critic where there is one, then the policy unless the critic warms up."""
        self.step += 1
        if self.critic is None or not batch.num_loss_tokens:
            return self.optimizer_step(batch)
        with self.timer.stage("train"):
            metrics = self.critic.train_step(batch)
        if self.critic.critic.is_warming_up(self.state.iteration):
            return StepResult(is_applied=False, grad_norm=math.nan, metrics=metrics)
        result = self.optimizer_step(batch)
        return dataclasses.replace(result, metrics=result.metrics | metrics)

    def optimizer_step(self, batch: StepBatch) -> StepResult:
        """Train the policy on one batch: forward-backward over its micro-batches, clip, step.

        Raises:
            NonFiniteError: more steps in a row were skipped than ``resilience.max_skipped_steps``.
        """
        if batch.num_loss_tokens == 0:
            return self._skip(float("nan"), {}, "no token to train on in any rank")
        with self.timer.stage("train"):
            self.optimizers.zero_grad(set_to_none=True)
            parts = forward_backward(
                self.policy,
                self.loss_fn,
                batch,
                temperature=self.config.sampling.temperature,
                prepare=self._prepare_inputs,
                context=self.train_context,
            )
            norm = clip_grad_norm_(self.policy.parameters(), self.config.training.max_norm, foreach=True)
            grad_norm = float(norm)
            metrics = reduce_metrics(parts, batch, self.collectives)
            if not math.isfinite(grad_norm):
                return self._skip(grad_norm, metrics, f"the gradient norm is {grad_norm}")
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
        self.state.policy_version += 1
        self.ntokens_seen += sum(micro_batch.num_tokens for micro_batch in batch.micro_batches)
        self._skipped_in_a_row = 0
        return StepResult(is_applied=True, grad_norm=grad_norm, metrics=metrics)

    def sync_weights(self) -> None:
        """Bring the policy to the generator, confirmed by the handshake."""
        with self.timer.stage("sync"):
            self.generator.wake_up()
            self.last_push = self.sync.push(self.state.policy_version)

    def evaluate(self) -> dict[str, float]:
        """Score held-out prompts and report the result; empty when nothing is held out."""
        section = self.config.evaluation
        with self.timer.stage("evaluate"):
            prompts = self.data.held_out_prompts()
            groups, _ = self.runner.run(
                list(enumerate(prompts)),
                group_size=section.samples_per_prompt,
                sampling=dataclasses.replace(self.data.sampling, temperature=section.temperature),
                policy_version=self.state.policy_version,
                purpose="evaluation",
            )
        return self.report.evaluation(groups)

    # ------------------------------------------------------------------------------------------ details

    timer: StageTimer
    _skipped_in_a_row: int

    def _resume(self) -> None:
        """Restore the newest checkpoint of this run, if there is one."""
        self.timer, self._skipped_in_a_row = StageTimer(), 0
        step = self.config.checkpoint.load_step
        try:
            self.checkpointer.load(step=step)
        except FileNotFoundError as error:
            raise ConfigError(
                "checkpoint.load_step", "name a checkpoint of this run", step, f"{error}."
            ) from error
        sampling, comm = self.config.sampling, self.config.comm
        if not math.isnan(self.state.kl_coefficient):
            self.loss_fn.kl.coefficient = self.state.kl_coefficient
        # A rank may wait this long for the slowest one's rollouts.
        longest = max(2 * sampling.timeout_seconds, comm.train_timeout_seconds)
        set_pg_timeouts(timedelta(seconds=longest), self.parallel_dims)

    def _batch(self, samples: list[Sample], per_rollout: Mapping[tuple[int, int], float]) -> StepBatch:
        """Pack one step's samples; without ``per_rollout`` their advantages are assigned later."""
        training, batching = self.config.training, self.config.batching
        advantages = [per_rollout.get((s.group_index, s.sample_index), 0.0) for s in samples]
        chosen = [index for index, sample in enumerate(samples) if any(sample.loss_mask)]
        num_samples = len(chosen)
        may_skip = batching.skip_zero_advantages and self.loss_fn.is_zero_without_advantage
        if may_skip and not self.credit.needs_scores:
            chosen = [index for index in chosen if advantages[index] != 0.0]
        packed = [samples[index] for index in chosen]
        micro_batches = pack(
            packed,
            [advantages[index] for index in chosen],
            token_budget=training.seq_len,
            rows_per_micro_batch=training.local_batch_size,
            pad_to=batching.pad_to,
        )
        self.report.count_padding(padding_fraction(micro_batches), len(micro_batches))
        batch = align_ranks(
            micro_batches,
            num_samples=num_samples,
            num_loss_tokens=sum(sum(sample.loss_mask) for sample in samples),
            collectives=self.collectives,
            device=self.device,
        )
        batch.samples = packed
        return batch

    def _choose_old_scorer(self, batches: Sequence[StepBatch]) -> LogprobScorer | None:
        """What scores under the old policy; None when nothing has to, or the generator's values serve."""
        if not self.needs.old:
            return None
        algorithm, mismatch = self.config.algorithm, self.state.mean_mismatch
        if algorithm.old_logprobs == "generator" and mismatch <= algorithm.max_mismatch:
            for batch in batches:
                batch.old_logprobs = [micro_batch.generator_logprobs for micro_batch in batch.micro_batches]
            return None
        if algorithm.old_logprobs == "generator" and math.isfinite(mismatch):  # infinite: not measured yet
            logger.warning(
                "Generator and trainer differ by %.1e nats per token, more than "
                "algorithm.max_mismatch = %.1e: old log-probabilities are recomputed in this iteration.",
                mismatch,
                algorithm.max_mismatch,
            )
        return self.old_scorer

    def _skip(self, grad_norm: float, metrics: dict[str, float], cause: str) -> StepResult:
        self.state.skipped_steps += 1
        self._skipped_in_a_row += 1
        logger.warning("Step %d is skipped: %s.", self.step, cause)
        if self._skipped_in_a_row > self.config.resilience.max_skipped_steps:
            raise NonFiniteError(
                f"{self._skipped_in_a_row} steps in a row were skipped, more than "
                f"resilience.max_skipped_steps; the last because {cause}. "
                "Look at the rollouts and at optimizer.lr."
            )
        return StepResult(is_applied=False, grad_norm=grad_norm, metrics=metrics)

    def _check_rewards(self, taken: Taken) -> None:
        rollouts = [r for g in (*taken.groups, *taken.dropped) for r in g.rollouts]
        rollouts += [g.baseline for g in (*taken.groups, *taken.dropped) if g.baseline is not None]
        failed = [r for r in rollouts if r.reward is None]
        sums = self.collectives.reduce({"failed": len(failed), "all": len(rollouts)}, "sum")
        self.state.dropped_samples += int(sums["failed"])
        if sums["failed"] > self.config.resilience.max_failed_reward_fraction * sums["all"]:
            self.report.record(taken, {})  # what failed can then be looked at
            cause = failed[0].reward_error if failed else "see the other ranks' logs"
            raise TitanRLError(
                f"{int(sums['failed'])} of {int(sums['all'])} rewards failed, more than "
                f"resilience.max_failed_reward_fraction. The first: {cause}."
            )
        if failed:
            logger.warning("%d rewards failed on this rank; first: %s", len(failed), failed[0].reward_error)

    def _is_trainable(self, group: Group) -> bool:
        """Whether enough of its rollouts have a reward, and its baseline too where there is one."""
        num_scored = sum(r.reward is not None for r in group.rollouts)
        has_baseline = group.baseline is None or group.baseline.reward is not None
        return num_scored >= self.needs.smallest_group and has_baseline

    def _adapt_kl_coefficient(self, results: Sequence[StepResult], batches: Sequence[StepBatch]) -> None:
        """Let the controller of the KL penalty see what was measured."""
        measured = self.report.mean_kl(results)
        if measured is not None:
            num_samples = sum(batch.num_samples for batch in batches)
            self.loss_fn.kl.coefficient = self.loss_fn.kl.adapted(measured, num_samples)
            self.state.kl_coefficient = self.loss_fn.kl.coefficient

    def _evaluation_is_due(self) -> bool:
        interval = self.config.evaluation.interval_steps
        return self.step >= self.config.training.steps or bool(interval and self.step % interval == 0)

    def _prepare_inputs(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        seen = self.ntokens_seen
        inputs, _, kwargs = self.post_dataloading_process(
            {"input": micro_batch.input_ids, "positions": micro_batch.positions}, micro_batch.targets
        )
        self.ntokens_seen = seen  # TorchTitan's hook counts every call; only trained batches should count
        return inputs, kwargs

    def _scorer(self, model: torch.nn.Module) -> LogprobScorer:
        return LogprobScorer(
            model,
            temperature=self.config.sampling.temperature,
            prepare=self._prepare_inputs,
            context=self.train_context,
        )

    def _reference_scorer(self) -> LogprobScorer | None:
        if not self.needs.reference:
            return None
        model = initial_weights.frozen_copy(self, offload_to_cpu=self.config.reference.offload_to_cpu)
        return self._scorer(model)

    def _critic_training(self) -> CriticTraining | None:
        if not self.needs.critic:
            return None
        critic = build_critic(
            self.config.critic or Critic.Config(),
            self,
            prepare=self._prepare_inputs,
            seed=self.run_seed,
            total_steps=self.config.training.steps,
        )
        training = CriticTraining(critic, self.collectives)
        if self.config.checkpoint.enable:
            self.checkpointer.states |= {"critic": critic, "value_moments": training}
        return training

    def _probe_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of tokens 1 to N - 1 at temperature 1, under the policy as it is now."""
        sample = Sample(
            token_ids=list(token_ids),
            loss_mask=[False] + [True] * (len(token_ids) - 1),
            generator_logprobs=[0.0] * len(token_ids),
            reward=0.0,
            group_index=0,
            sample_index=0,
            is_truncated=False,
        )
        batch = pack([sample], [0.0], token_budget=self.config.training.seq_len, rows_per_micro_batch=1)[0]
        scorer = LogprobScorer(
            self.policy, temperature=1.0, prepare=self._prepare_inputs, context=self.train_context
        )
        return scorer(batch.to(self.device))[0, : len(token_ids) - 1].tolist()

    def close(self) -> None:
        """Release the generator and the reward workers, then what TorchTitan holds."""
        for name in ("rewards", "generator"):
            collaborator = getattr(self, name, None)
            if collaborator is not None:
                collaborator.close()
        super().close()
