"""Who gets the credit: from scored groups to an advantage at every trained token. What an advantage is worth
is the algorithm's business (:mod:`titan_rl.algorithms`); this finds the tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from titan_rl.algorithms.interfaces import KL, Advantage, TokenAdvantage, TokenRewards
from titan_rl.algorithms.shaping import ShapingSection, group_rewards, set_weight
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.functional.segments import is_last_trained
from titan_rl.functional.whitening import whiten, whitening_sums
from titan_rl.titan.collectives import Collectives
from titan_rl.trainers.optimization import StepBatch
from titan_rl.types import Group, Sample

RolloutKey = tuple[int, int]
"""``(Group.index, Rollout.sample_index)``: names a rollout of an iteration."""


class Credit:
    """Shapes rewards, asks the advantage, and puts what it says at the tokens of scored batches."""

    def __init__(
        self,
        advantage: Advantage,
        shaping: ShapingSection,
        *,
        kl_in_reward: KL | None,
        max_tokens: int,
        collectives: Collectives,
    ) -> None:
        """Bind the parts.

        Args:
            advantage: Per rollout, or a :class:`TokenAdvantage`.
            shaping: ``[shaping]``.
            kl_in_reward: The penalty that is subtracted from rewards; None for none.
            max_tokens: ``sampling.max_tokens``.
            collectives: Of the run.
        """
        self._advantage, self._shaping, self._kl = advantage, shaping, kl_in_reward
        self._max_tokens, self._collectives = max_tokens, collectives

    @property
    def needs_scores(self) -> bool:
        """Whether advantages are known only after scoring; otherwise :meth:`of_rollouts` is all."""
        is_per_token = isinstance(self._advantage, TokenAdvantage)
        return is_per_token or self._kl is not None or self._shaping.whiten

    def of_rollouts(
        self, groups: Sequence[Group], penalties: Mapping[RolloutKey, float] | None = None
    ) -> dict[RolloutKey, float]:
        """What the advantage gives to each scored rollout, times the weight of its prompt set.

        Args:
            groups: To be trained on.
            penalties: Subtracted from the rewards first.
        """
        outcomes = self._outcomes(groups, penalties)
        return {key: outcomes[key] * weight for key, weight in self._weights(groups).items()}

    def _outcomes(
        self, groups: Sequence[Group], penalties: Mapping[RolloutKey, float] | None = None
    ) -> dict[RolloutKey, float]:
        rewards = group_rewards(groups, self._shaping, self._max_tokens, penalties)
        return dict(zip(self._weights(groups), self._advantage(rewards), strict=True))

    def _weights(self, groups: Sequence[Group]) -> dict[RolloutKey, float]:
        """Factor of the advantages of every scored rollout, in their order."""
        return {
            (group.index, rollout.sample_index): set_weight(group, self._shaping)
            for group in groups
            for rollout in group.rollouts
            if rollout.reward is not None
        }

    def assign(self, groups: Sequence[Group], batches: Sequence[StepBatch]) -> dict[str, float]:
        """Put advantages, and returns for a critic, into the scored batches of an iteration. Collective.

        Args:
            groups: Those of the batches.
            batches: With old and reference log-probabilities and values where needed; changed in place.

        Returns:
            Metrics over all ranks.
        """
        metrics: dict[str, float] = {}
        penalties = self._kl_penalties(batches, metrics)
        if isinstance(self._advantage, TokenAdvantage):
            self._assign_per_token(self._advantage, groups, batches, penalties)
        else:
            per_rollout = self.of_rollouts(groups, _sum_by_rollout(batches, penalties))
            for batch in batches:
                values = _per_sample(batch, per_rollout)
                self._replace(batch, [spread(values, m) for m in batch.micro_batches])
        if self._shaping.whiten:
            self._whiten(batches)
        return metrics

    def _kl_penalties(
        self, batches: Sequence[StepBatch], metrics: dict[str, float]
    ) -> list[list[torch.Tensor]] | None:
        """Coefficient times estimate at the trained tokens of every micro-batch."""
        if self._kl is None:
            return None
        estimates = []
        for batch in batches:
            pairs = zip(batch.micro_batches, batch.old_logprobs, batch.ref_logprobs, strict=True)
            estimates.append([torch.where(m.loss_mask, self._kl(old, ref), 0.0) for m, old, ref in pairs])
        sums = {"kl": sum(float(e.sum()) for of_step in estimates for e in of_step)}
        tokens = max(sum(batch.num_computed_tokens for batch in batches), 1)
        metrics["reward/kl_mean"] = self._collectives.reduce(sums, "sum")["kl"] / tokens
        metrics["reward/kl_coefficient"] = self._kl.coefficient
        return [[e * self._kl.coefficient for e in of_step] for of_step in estimates]

    def _assign_per_token(
        self,
        advantage: TokenAdvantage,
        groups: Sequence[Group],
        batches: Sequence[StepBatch],
        penalties: list[list[torch.Tensor]] | None,
    ) -> None:
        outcomes, weights = self._outcomes(groups), self._weights(groups)
        for step, batch in enumerate(batches):
            values, factors = _per_sample(batch, outcomes), _per_sample(batch, weights)
            advantages: list[torch.Tensor] = []
            for i, micro_batch in enumerate(batch.micro_batches):
                at_end = is_last_trained(micro_batch.loss_mask, micro_batch.sample_index)
                rewards = torch.where(at_end, spread(values, micro_batch), 0.0)
                credit = advantage.over_tokens(
                    TokenRewards(
                        rewards=rewards if penalties is None else rewards - penalties[step][i],
                        loss_mask=micro_batch.loss_mask,
                        sample_index=micro_batch.sample_index,
                        values=batch.values[i] if batch.values else None,
                    )
                )
                # The returns stay as they are: a critic that predicts rewards learns nothing of weights.
                advantages.append(credit.advantages * spread(factors, micro_batch))
                if credit.returns is not None:
                    batch.returns.append(credit.returns)
            self._replace(batch, advantages)

    def _whiten(self, batches: Sequence[StepBatch]) -> None:
        of_all = [m for batch in batches for m in batch.micro_batches]
        local = [whitening_sums(m.advantages, m.loss_mask) for m in of_all]
        names = ("count", "sum", "square")
        totals = {name: sum(float(part[i]) for part in local) for i, name in enumerate(names)}
        reduced = self._collectives.reduce(totals, "sum")
        for batch in batches:
            whitened = [
                whiten(m.advantages, m.loss_mask, *(reduced[name] for name in names))
                for m in batch.micro_batches
            ]
            self._replace(batch, whitened)

    @staticmethod
    def _replace(batch: StepBatch, advantages: Sequence[torch.Tensor]) -> None:
        batch.micro_batches = [
            dataclasses.replace(m, advantages=a) for m, a in zip(batch.micro_batches, advantages, strict=True)
        ]


def spread(values: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """Put one value per sample at all its trained tokens; 0 elsewhere.

    Args:
        values: ``[N]``, one per sample of the step.
        micro_batch: With ``sample_index`` in ``-1 ... N - 1``.
    """
    if not len(values):
        return torch.zeros_like(micro_batch.advantages)
    values = values.to(micro_batch.advantages)
    return torch.where(micro_batch.loss_mask, values[micro_batch.sample_index.clamp(min=0)], 0.0)


def mean_by_rollout(batches: Sequence[StepBatch]) -> dict[RolloutKey, float]:
    """Mean advantage over the trained tokens of each rollout of this rank, for the record. Collective."""
    means: dict[RolloutKey, float] = {}
    for batch in batches:
        totals = _sum_by_sample(batch, [m.advantages for m in batch.micro_batches])
        counts = _sum_by_sample(batch, [m.loss_mask for m in batch.micro_batches])
        means |= _by_rollout(batch, totals / counts.clamp(min=1))
    return means


def _key(sample: Sample) -> RolloutKey:
    return sample.group_index, sample.sample_index


def _per_sample(batch: StepBatch, of_rollouts: Mapping[RolloutKey, float]) -> torch.Tensor:
    """What belongs to the rollout of each sample that this rank trains, from the rank that has its group."""
    if batch.deal is None:
        values = [of_rollouts[_key(sample)] for sample in batch.samples]
    else:
        values = batch.deal.to_holders([of_rollouts[_key(sample)] for sample in batch.deal.own])
    return torch.tensor(values, dtype=torch.float64)


def _by_rollout(batch: StepBatch, values: torch.Tensor) -> dict[RolloutKey, float]:
    """The other way: a number of each sample that some rank trains, on the rank that has its group."""
    if batch.deal is None:
        return dict(zip(map(_key, batch.samples), values.tolist(), strict=True))
    return dict(zip(map(_key, batch.deal.own), batch.deal.to_owners(values.tolist()), strict=True))


def _sum_by_sample(batch: StepBatch, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[N]`` fp64 sums of a value per token over the trained tokens of each sample that this rank trains."""
    totals = torch.zeros(len(batch.samples), dtype=torch.float64)
    for micro_batch, value in zip(batch.micro_batches, values, strict=True):
        mask = micro_batch.loss_mask
        totals.index_add_(0, micro_batch.sample_index[mask].cpu(), value[mask].double().cpu())
    return totals


def _sum_by_rollout(
    batches: Sequence[StepBatch], values: list[list[torch.Tensor]] | None
) -> dict[RolloutKey, float] | None:
    """Sum of a value per token over the tokens of each rollout of this rank. Collective unless None."""
    if values is None:
        return None
    sums: dict[RolloutKey, float] = {}
    for batch, of_step in zip(batches, values, strict=True):
        sums |= _by_rollout(batch, _sum_by_sample(batch, of_step))
    return sums
