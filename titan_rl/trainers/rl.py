"""The RL trainer: TorchTitan's trainer with rollouts for data. The loop is :meth:`RLTrainer.train`."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from titan_rl.algorithms.loss import Loss
from titan_rl.algorithms.preset import derive_needs
from titan_rl.config.choice import build
from titan_rl.errors import ConfigError, RollBackError, StopRequestedError, TitanRLError
from titan_rl.functional.expert_load import expert_load
from titan_rl.observability.stages import StageTimer
from titan_rl.policy.critic import Critic, build_critic
from titan_rl.policy.teacher import Teacher, build_teacher
from titan_rl.policy.token_scores import LogprobScorer
from titan_rl.resilience import faults
from titan_rl.resilience.manifest import Facts
from titan_rl.resilience.skip_limit import SkipLimit
from titan_rl.resilience.state import RunState, seed_process
from titan_rl.rollout.permutation import permute_rewards
from titan_rl.rollout.source import Taken
from titan_rl.titan import waiting
from titan_rl.titan.api import Profiler, logger, set_pg_timeouts
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.sharded_model import ShardedModel
from titan_rl.trainers import assembly, checks, earlier_start, initial_weights
from titan_rl.trainers.batch_maker import BatchMaker
from titan_rl.trainers.model_reward import ModelReward
from titan_rl.trainers.optimization import (
    StepBatch,
    StepResult,
    forward_backward,
    reduce_metrics,
)
from titan_rl.trainers.reporting import Reporter
from titan_rl.trainers.resilient import ResilientTrainer
from titan_rl.trainers.rl_config import RLConfig
from titan_rl.types import Sample
from titan_rl.weight_sync.push import WeightSync

EVALUATION_FOLDER = "evaluation"
"""Below ``dump_folder``: what an evaluation by itself writes."""


class RLTrainer(ResilientTrainer):
    """Reinforcement learning as a TorchTitan trainer.

    TorchTitan builds the sharded policy, optimiser, schedule, checkpointer and metrics. Added after it: the
    generator, the rewards, the reference, and the loop.
    """

    kind = "rl"
    look_at = "the rollouts"

    @dataclass(kw_only=True, slots=True)
    class Config(RLConfig):
        """TorchTitan's sections, and ours."""

    # Narrower than TorchTitan declares them, because the configuration above is.
    config: Config  # pyrefly: ignore[bad-override-mutable-attribute]
    loss_fn: Loss  # pyrefly: ignore[bad-override]

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
        self.state = RunState(seed=self.run_seed, data_fingerprint=data.fingerprint)
        earlier_start.check_resume(config, self.state, name="rl_state")
        super().__init__(config)
        self.policy = ShardedModel.of_trainer(self)
        self.policy.reduce_gradients(config.batching.reduce_gradients)
        self.policy.watch_routers()
        self.policy.skip_head()  # it is applied to trained tokens only, in chunks
        self.collectives = Collectives(self.parallel_dims, self.device)
        self.needs = derive_needs(
            self.advantage, self.loss_fn, steps_per_iteration=config.algorithm.steps_per_iteration
        )
        if self.config.checkpoint.enable:  # otherwise TorchTitan's checkpointer has no states
            self.checkpointer.states["rl_state"] = self.state
        initial_weights.load(self)
        self.critic = self._build_critic()
        self.teacher = self._build_teacher()
        self.data = data
        self.generator = assembly.build_generator(self)
        self.rewards = assembly.build_rewards(config)
        self.runner = assembly.build_runner(self, data)
        self.model_reward = None if config.reward_model is None else ModelReward(self, config.reward_model)
        self.source = assembly.build_source(self, data)
        self.batch_maker = BatchMaker(self)
        self.sync = WeightSync(
            config.weight_sync,
            stream=assembly.weight_stream(self),
            generator=self.generator,
            policy_logprobs=self._probe_logprobs,
            probe=data.probe(),
            collectives=self.collectives,
            changes=assembly.changing_weights(self),
        )
        self.report = Reporter(self)

    def train(self) -> None:
        """Run iterations until ``training.steps`` optimiser steps are done."""
        self._resume()
        self.report.start()
        self.sync_weights()
        if self.state.iteration == 0 or self.state.is_evaluation_left:
            self.evaluate()
        with self.config.profiler.build(
            global_step=self.step, base_folder=self.config.dump_folder
        ) as profiler:
            self._iterate(profiler)
        if self.outcome == "done":
            self.report.finish()

    def _iterate(self, profiler: Profiler) -> None:
        """The loop: one iteration from top to bottom."""
        while self.should_continue_training():
            self.gc_handler.run(self.state.iteration + 1)
            seed_process(self.run_seed, self.state.iteration, self.collectives.data_rank)
            try:
                taken = self.generate()
            except StopRequestedError:
                continue  # nothing of this iteration has happened; the loop's condition saves and ends it
            batches = self.batch_maker.make(taken)
            try:
                results = [self.update(batch) for batch in batches]
            except RollBackError:
                self._go_back()
                continue
            self.state.iteration += 1
            self._adapt_kl_coefficient(results, batches)
            self.sync_weights()
            if self.is_due(self.config.evaluation.interval_steps):
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
        folder = Path(self.config.dump_folder) / EVALUATION_FOLDER
        self.report = Reporter(self, folder=folder)
        self._resume()
        self.sync_weights()
        metrics = self.evaluate()
        if self.state.is_evaluation_left:
            raise StopRequestedError("The evaluation was given up: the process was asked to stop.")
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

    def update(self, batch: StepBatch) -> StepResult:
        """Train on one batch: the critic where there is one, then the policy unless the critic warms up.

        Raises:
            NonFiniteError: more steps in a row were skipped than ``resilience.max_skipped_steps``, of the
                policy or of the critic.
        """
        self.step += 1
        if self.critic is None or not batch.num_loss_tokens:
            return self.optimizer_step(batch)
        with self.timer.stage("train"):
            self.checkpointer.maybe_wait_for_staging()
            of_critic = self.critic.train_step(
                batch.micro_batches,
                returns=batch.returns,
                old_values=batch.values,
                num_loss_tokens=batch.num_loss_tokens,
            )
        if of_critic.is_applied:
            self.critic_skip_limit.applied()
        else:
            cause = f"the critic's gradient norm is {of_critic.grad_norm}"
            self.critic_skip_limit.skipped(cause)
            self.bad_steps.act(cause)
        if self.critic.is_warming_up(self.state.iteration):
            return StepResult(is_applied=False, grad_norm=math.nan, metrics=of_critic.metrics)
        result = self.optimizer_step(batch)
        return dataclasses.replace(result, metrics=result.metrics | of_critic.metrics)

    def optimizer_step(self, batch: StepBatch) -> StepResult:
        """Train the policy on one batch: forward-backward over its micro-batches, clip, step.

        Raises:
            NonFiniteError: as for :meth:`update`.
        """
        if batch.num_loss_tokens == 0:
            self.state.skipped_steps += 1
            self.bad_steps.leave_out("no token to train on in any rank")
            return StepResult(is_applied=False, grad_norm=math.nan, metrics={})
        with self.timer.stage("train"):
            self.optimizers.zero_grad(set_to_none=True)
            parts = forward_backward(
                self.policy,
                self.loss_fn,
                batch,
                temperature=self.config.sampling.temperature,
                max_tokens=self.config.sampling.max_tokens,
                teacher=self.teacher,
            )
            faults.at("optimizer.before", values=self.policy.parameters())
            grad_norm = self.policy.clip_grad_norm(self.config.training.max_norm)
            metrics = reduce_metrics(parts, batch, self.collectives)
            load = expert_load(self.policy.take_router_load())
            metrics |= {f"moe/{name}": value for name, value in load.items()}
            if self.loss_fn.has_kl_in_loss:
                metrics["loss/kl_coefficient"] = self.loss_fn.kl.coefficient
            cause = self.bad_steps.guard.fault(grad_norm)
            if cause is not None:
                self.state.skipped_steps += 1
                losses = [float(part["loss/mean"]) for part in parts]
                self.bad_steps.refuse(cause, losses=losses, tensors=batch.tensors)
                return StepResult(is_applied=False, grad_norm=grad_norm, metrics=metrics)
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
            faults.at("optimizer.after")
        self.state.policy_version += 1
        self.ntokens_seen += sum(micro_batch.num_tokens for micro_batch in batch.micro_batches)
        self.bad_steps.applied(grad_norm)
        return StepResult(is_applied=True, grad_norm=grad_norm, metrics=metrics)

    def sync_weights(self) -> None:
        """Bring the policy to the generator, confirmed by the handshake."""
        with self.timer.stage("sync"):
            self.generator.wake_up()
            started = time.perf_counter()
            self.last_push = self.sync.push(self.state.policy_version)
            self.last_push_seconds = time.perf_counter() - started

    def evaluate(self) -> dict[str, float]:
        """Score held-out prompts and report the result; empty when nothing is held out."""
        section = self.config.evaluation
        self.state.is_evaluation_left = 1
        with self.timer.stage("evaluate"):
            faults.at("evaluation")
            prompts = self.data.held_out_prompts()
            try:
                groups, _ = self.runner.run(
                    list(enumerate(prompts)),
                    group_size=section.samples_per_prompt,
                    sampling=dataclasses.replace(self.data.sampling, temperature=section.temperature),
                    policy_version=self.state.policy_version,
                    purpose="evaluation",
                )
            except StopRequestedError:
                return {}  # left to the start that continues this run
            if self.model_reward is not None and not self.config.reward:
                self.model_reward(groups)
        self.state.is_evaluation_left = 0
        return self.report.evaluation(groups)

    # ------------------------------------------------------------------------------------------ details

    timer: StageTimer
    critic_skip_limit: SkipLimit

    def has_work_left(self) -> bool:
        """Whether an evaluation was given up."""
        return bool(self.state.is_evaluation_left)

    def facts(self) -> Facts:
        """Reward of the last iteration, held-out score of this step, and the counters."""
        return Facts(
            trainer=self.kind,
            reward=self.report.reward,
            held_out=self.report.held_out(self.step),
            state={"rl_state": self.state.numbers()},
        )

    def _resume(self) -> None:
        """Restore the newest checkpoint of this run, if there is one."""
        self.timer = StageTimer(waiting.waited_seconds)
        self.critic_skip_limit = SkipLimit(
            self.config.resilience.max_skipped_steps,
            of="the critic",
            look_at="the rewards and at critic.optimizer.lr",
        )
        self._first_kl_coefficient = self.loss_fn.kl.coefficient
        self.checkpointer.load(step=self.config.checkpoint.load_step)
        sampling, comm = self.config.sampling, self.config.comm
        self._restore_kl_coefficient()
        # A rank may wait this long for the slowest one's rollouts.
        longest = max(2 * sampling.timeout_seconds, comm.train_timeout_seconds)
        set_pg_timeouts(timedelta(seconds=longest), self.parallel_dims)

    def _go_back(self) -> None:
        """Go on from the newest checkpoint, with the prompts after those that have been drawn."""
        names = ("cursor", "skipped_steps", "dropped_samples", "dropped_groups")
        kept = {name: getattr(self.state, name) for name in names}
        self.bad_steps.go_back()
        for name, value in kept.items():
            setattr(self.state, name, value)
        self._restore_kl_coefficient()
        self.report.forget_later_steps()
        self.sync_weights()

    def _restore_kl_coefficient(self) -> None:
        moved = self.state.kl_coefficient
        self.loss_fn.kl.coefficient = self._first_kl_coefficient if math.isnan(moved) else moved

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

    def _adapt_kl_coefficient(self, results: Sequence[StepResult], batches: Sequence[StepBatch]) -> None:
        """Let the controller of the KL penalty see what was measured."""
        measured = self.report.mean_kl(results)
        if measured is None:
            return
        adapted = self.loss_fn.kl.adapted(measured, sum(batch.num_samples for batch in batches))
        if adapted != self.loss_fn.kl.coefficient:  # a fixed one stays the configuration's, also on resume
            self.loss_fn.kl.coefficient = self.state.kl_coefficient = adapted

    def _build_critic(self) -> Critic | None:
        if not self.needs.critic:
            return None
        critic = build_critic(
            self.config.critic or Critic.Config(),
            self,
            policy=self.policy,
            collectives=self.collectives,
            seed=self.run_seed,
            total_steps=self.config.training.steps,
        )
        critic.model.reduce_gradients(self.config.batching.reduce_gradients)
        if self.config.checkpoint.enable:
            self.checkpointer.states["critic"] = critic
        return critic

    def _build_teacher(self) -> Teacher | None:
        section = self.config.teacher
        return None if section is None else build_teacher(section, self)

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
        batch = self.batch_maker.pack([sample], [0.0])[0]
        scorer = LogprobScorer(self.policy, temperature=1.0)
        return scorer([batch.to(self.device)])[0][0, : len(token_ids) - 1].tolist()

    def close(self) -> None:
        """Release the generator and the reward workers, then what TorchTitan holds."""
        for name in ("rewards", "generator"):
            collaborator = getattr(self, name, None)
            if collaborator is not None:
                collaborator.close()
        super().close()
