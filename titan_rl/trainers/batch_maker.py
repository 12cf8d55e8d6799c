"""From the groups of an iteration to scored batches with advantages, one for each optimiser step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.batching.pack import num_micro_batches, pack, units_of
from titan_rl.batching.steps import split_into_steps
from titan_rl.policy.token_scores import LogprobScorer
from titan_rl.resilience import faults
from titan_rl.rollout.samples import to_samples
from titan_rl.rollout.source import Taken
from titan_rl.titan.api import logger
from titan_rl.titan.architecture import architecture_of
from titan_rl.titan.sharded_model import ShardedModel
from titan_rl.trainers import initial_weights
from titan_rl.trainers.credit import Credit, RolloutKey, mean_by_rollout
from titan_rl.trainers.deal import Deal
from titan_rl.trainers.optimization import StepBatch, align_ranks, score_batch
from titan_rl.trainers.row_shape import row_shape, shares_prompts
from titan_rl.types import Group, Sample

if TYPE_CHECKING:
    from titan_rl.trainers.rl import RLTrainer


class BatchMaker:
    """Cuts samples, packs them, scores them with the models that the algorithm needs, assigns advantages."""

    def __init__(self, trainer: RLTrainer) -> None:
        """Build the scorers. Collective.

        Args:
            trainer: Whose policy has its initial weights; the reference is a copy of them, or with low-rank
                adapters the policy without those.
        """
        self._trainer, config, kl = trainer, trainer.config, trainer.loss_fn.kl
        self._shares_prompts = shares_prompts(config)
        self._attention_cost = architecture_of(trainer.model_config).attention_cost
        self._old = self._scorer(trainer.policy)
        self._reference: LogprobScorer | None = None
        if trainer.needs.reference and config.lora is not None:
            self._reference = self._scorer(trainer.policy, without_adapters=True)
        elif trainer.needs.reference:
            offload = config.reference.offload_to_cpu
            self._reference = self._scorer(initial_weights.frozen_copy(trainer, offload_to_cpu=offload))
        self._credit = Credit(
            trainer.advantage,
            config.shaping,
            kl_in_reward=kl if trainer.needs.reference and kl.is_in_reward else None,
            max_tokens=config.sampling.max_tokens,
            collectives=trainer.collectives,
        )

    def make(self, taken: Taken) -> list[StepBatch]:
        """Batches of the iteration, ready to train on. Collective.

        Args:
            taken: This rank's groups; those that cannot be trained on move to the dropped ones.
        """
        trainer, config = self._trainer, self._trainer.config
        groups = [group for group in taken.groups if self._is_trainable(group)]
        taken.dropped += [group for group in taken.groups if not self._is_trainable(group)]
        taken.groups = groups
        trainer.state.dropped_groups += int(trainer.collectives.reduce_scalar(len(taken.dropped), "sum"))
        per_rollout = {} if self._credit.needs_scores else self._credit.of_rollouts(groups)
        samples = to_samples(groups, mask_truncated=config.shaping.mask_truncated)
        of_ranks = trainer.collectives.gather_integers([group.index for group in groups])
        steps = split_into_steps(
            samples, config.algorithm.steps_per_iteration, group_indices=itertools.chain(*of_ranks)
        )
        batches = [self._pack([samples[i] for i in chosen], per_rollout) for chosen in steps]
        with trainer.timer.stage("score"):
            self._score(batches)
            if self._credit.needs_scores:
                trainer.report.measured(self._credit.assign(groups, batches))
                per_rollout = mean_by_rollout(batches)
            faults.at("advantage", values=(m.advantages for batch in batches for m in batch.micro_batches))
            if trainer.critic is not None:
                trainer.checkpointer.maybe_wait_for_staging()  # the head may be rescaled
                trainer.critic.observe(
                    [returns for batch in batches for returns in batch.returns],
                    [m.loss_mask for batch in batches for m in batch.micro_batches],
                )
        trainer.report.record(taken, per_rollout)
        return batches

    def _is_trainable(self, group: Group) -> bool:
        """Whether enough of its rollouts have a reward, and its baseline too where there is one."""
        num_scored = sum(r.reward is not None for r in group.rollouts)
        has_baseline = group.baseline is None or group.baseline.reward is not None
        return num_scored >= self._trainer.needs.smallest_group and has_baseline

    def _pack(self, samples: list[Sample], per_rollout: Mapping[RolloutKey, float]) -> StepBatch:
        """Deal one step's samples to the ranks and pack what this one trains. Collective.

        Without ``per_rollout`` their advantages are assigned later.
        """
        trainer = self._trainer
        batching = trainer.config.batching
        advantages = [per_rollout.get((s.group_index, s.sample_index), 0.0) for s in samples]
        chosen = [index for index, sample in enumerate(samples) if any(sample.loss_mask)]
        num_samples = len(chosen)
        may_skip = batching.skip_zero_advantages and trainer.loss_fn.is_zero_without_advantage
        if may_skip and not self._credit.needs_scores:
            chosen = [index for index in chosen if advantages[index] != 0.0]
        deal = self._deal([samples[index] for index in chosen])
        advantages = deal.to_holders([advantages[index] for index in chosen])
        batch = align_ranks(
            self.pack(
                deal.held,
                advantages,
                share_prompts=self._shares_prompts,
                at_least=self._num_micro_batches(deal.held),
            ),
            num_samples=num_samples,
            num_loss_tokens=sum(sum(sample.loss_mask) for sample in samples),
            collectives=trainer.collectives,
            device=trainer.device,
            empty_shape=row_shape(trainer.config).empty,
        )
        batch.samples, batch.deal = deal.held, deal
        trainer.report.packed(batch.micro_batches, deal, attention_cost=self._attention_cost)
        return batch

    def _deal(self, samples: list[Sample]) -> Deal:
        """Give every rank the same work, with a shared prompt counted once. Collective."""
        budget = self._trainer.config.training.seq_len
        return Deal(
            samples,
            attention_cost=self._attention_cost,
            collectives=self._trainer.collectives,
            units=units_of(samples, budget=budget, share_prompts=self._shares_prompts),
        )

    def _num_micro_batches(self, samples: Sequence[Sample]) -> int:
        """Micro-batches of the rank that needs most of them. Collective."""
        config = self._trainer.config
        needed = num_micro_batches(
            samples,
            token_budget=config.training.seq_len,
            rows_per_micro_batch=row_shape(config).rows,
            share_prompts=self._shares_prompts,
        )
        return int(self._trainer.collectives.reduce_scalar(needed, "max"))

    def _score(self, batches: Sequence[StepBatch]) -> None:
        old = self._choose_old_scorer(batches)
        for batch in batches:
            score_batch(batch, old=old, reference=self._reference)
            if self._trainer.critic is not None:
                batch.values = self._trainer.critic(batch.micro_batches)

    def _choose_old_scorer(self, batches: Sequence[StepBatch]) -> LogprobScorer | None:
        """What scores under the old policy; None when nothing has to, or the generator's values serve."""
        trainer = self._trainer
        if not trainer.needs.old:
            return None
        algorithm, mismatch = trainer.config.algorithm, trainer.state.mean_mismatch
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
        return self._old

    def pack(
        self,
        samples: Sequence[Sample],
        advantages: Sequence[float],
        *,
        share_prompts: bool = False,
        at_least: int = 1,
    ) -> list[MicroBatch]:
        """Rows as this run's layout takes them.

        Args:
            samples: What to score or train on.
            advantages: One a sample.
            share_prompts: Whether siblings' prompt stands in a row once.
            at_least: Micro-batches to spread them over.
        """
        config = self._trainer.config
        shape = row_shape(config)
        return pack(
            samples,
            advantages,
            token_budget=config.training.seq_len,
            rows_per_micro_batch=shape.rows,
            length_multiple=shape.length_multiple,
            pad_to="token_budget" if shape.is_fixed else config.batching.pad_to,
            share_prompts=share_prompts,
            at_least=at_least,
        )

    def _scorer(self, model: ShardedModel, *, without_adapters: bool = False) -> LogprobScorer:
        temperature = self._trainer.config.sampling.temperature
        return LogprobScorer(model, temperature=temperature, without_adapters=without_adapters)
