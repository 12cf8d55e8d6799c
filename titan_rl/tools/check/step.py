"""One optimiser step of a user's algorithm on a small model: loss and whole gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from titan_rl.algorithms.interfaces import Needs
from titan_rl.algorithms.preset import derive_needs
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.batching.pack import pack
from titan_rl.config.choice import build
from titan_rl.policy.critic import Critic, build_critic
from titan_rl.policy.teacher import Teacher
from titan_rl.policy.token_scores import LogprobScorer
from titan_rl.resilience.seeds import derive_seed
from titan_rl.rollout.samples import to_samples
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.init import copy_full
from titan_rl.titan.models import build_sharded, build_sibling
from titan_rl.titan.sharded_model import ShardedModel
from titan_rl.titan.without_trainer import trainer_parts
from titan_rl.tools.check.layouts import Case
from titan_rl.tools.check.rollouts import LONGEST, MAX_GROUP_SIZE, MAX_TOKENS, make_groups
from titan_rl.tools.check.shrink import VOCAB_SIZE
from titan_rl.trainers.credit import Credit
from titan_rl.trainers.optimization import (
    StepBatch,
    align_ranks,
    forward_backward,
    reduce_metrics,
    score_batch,
)
from titan_rl.trainers.row_shape import row_shape, shares_prompts
from titan_rl.types import Sample

_SEED = 11
# Weights of 0.15: with wilder ones rounding alone comes near the bound.
_WEIGHT_STD, _HEAD_STD, _OTHER_MODEL = 0.15, 0.3, 0.02
_OLD_NOISE, _GENERATOR_NOISE, _VALUE_NOISE = 0.4, 0.1, 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """What a step gave: the losses by name, and whole gradients by parameter."""

    losses: dict[str, float]
    gradients: dict[str, torch.Tensor]


class SmallRun:
    """The models of a small run under one layout, and the steps of its algorithm."""

    def __init__(self, config: Any) -> None:
        """Build the models. Collective.

        Args:
            config: From :func:`titan_rl.tools.check.shrink.shrink_config`.
        """
        self.config = config
        self._parts = cast(Any, trainer_parts(config))  # what builders read of a trainer
        self.policy = build_sharded(
            self._parts, config.model_spec, self._parts.model_config, ac_config=config.activation_checkpoint
        )
        self.policy.skip_head()
        randomise(self.policy, salt="")
        self.collectives = Collectives(self._parts.parallel_dims, self._parts.device)
        self._advantage, self._loss = build(config.advantage), config.loss.build()
        self.needs: Needs = derive_needs(self._advantage, self._loss, steps_per_iteration=2)
        self._reference = self._other("reference") if self.needs.reference else None
        self._teacher = self._build_teacher() if self.needs.teacher else None
        size = max(min(config.sampling.group_size, MAX_GROUP_SIZE), self.needs.smallest_group)
        self.groups = make_groups(size, vocab_size=VOCAB_SIZE, with_baseline=self.needs.greedy_baseline)
        # By group, sample and position: what is drawn belongs to a token, wherever it comes to lie.
        shape = 3, len(self.groups), size, LONGEST
        self._noise = torch.randn(shape, generator=torch.Generator().manual_seed(_SEED))

    def _other(self, salt: str) -> ShardedModel:
        """A frozen model like the policy, with weights a little off."""
        model = build_sibling(self._parts)
        randomise(model, salt=salt)
        return model

    def _build_teacher(self) -> Teacher:
        return Teacher(
            self.config.teacher or Teacher.Config(),
            model=self._other("teacher"),
            temperature=self.config.sampling.temperature,
        )

    def _build_critic(self) -> Critic:
        config = dataclasses.replace(
            self.config.critic or Critic.Config(), head_init_std=_HEAD_STD, initial_load_path=""
        )
        return build_critic(
            config,
            self._parts,
            policy=self.policy,
            collectives=self.collectives,
            seed=_SEED,
            total_steps=10,
        )

    def step(self, case: Case) -> Step:
        """Loss and gradients of policy and critic. Collective.

        Args:
            case: How the samples are laid out.
        """
        critic = self._build_critic() if self.needs.critic else None
        batch = self._batch(case, critic)
        parts = forward_backward(
            self.policy,
            self._loss,
            batch,
            temperature=self.config.sampling.temperature,
            max_tokens=self.config.sampling.max_tokens,
            teacher=self._teacher,
        )
        losses = {"loss": reduce_metrics(parts, batch, self.collectives)["loss/loss"]}
        gradients = _taken(self.policy, "")
        if critic is not None and batch.returns:
            parts = critic.accumulate(
                batch.micro_batches,
                returns=batch.returns,
                old_values=batch.values,
                num_loss_tokens=batch.num_loss_tokens,
            )
            value_loss = sum(float(part["loss"]) for part in parts)
            losses["critic.loss"] = self.collectives.reduce_scalar(value_loss, "sum")
            gradients |= _taken(critic.model, "critic.")
        return Step(losses, gradients)

    def _batch(self, case: Case, critic: Critic | None) -> StepBatch:
        """This rank's samples as micro-batches, scored, with advantages."""
        mine = self.groups[self.collectives.data_rank :: self.collectives.data_size]
        if case.is_lopsided:
            mine = self.groups if self.collectives.data_rank == 0 else []
        samples = to_samples(mine, mask_truncated=self.config.shaping.mask_truncated)
        samples = [sample for sample in samples if any(sample.loss_mask)]
        batch = align_ranks(
            self._laid_out(samples, case),
            num_samples=len(samples),
            collectives=self.collectives,
            device=self._parts.device,
            empty_shape=row_shape(self.config).empty,
        )
        batch.samples = samples
        self._score(batch, critic)
        credit = Credit(
            self._advantage,
            self.config.shaping,
            kl_in_reward=self._loss.kl if self.needs.reference and self._loss.kl.is_in_reward else None,
            max_tokens=MAX_TOKENS,
            collectives=self.collectives,
        )
        credit.assign(mine, [batch])
        if critic is not None:
            critic.observe(batch.returns, [m.loss_mask for m in batch.micro_batches])
        return batch

    def _score(self, batch: StepBatch, critic: Critic | None) -> None:
        """Old, generator and reference log-probabilities and values; old ones are not the policy's."""
        old, reference = self._scorer(self.policy), self._reference
        score_batch(batch, old=old, reference=None if reference is None else self._scorer(reference))
        noise = [self._noise_of(m, batch.samples) for m in batch.micro_batches]
        batch.old_logprobs = [
            logprobs + _OLD_NOISE * n[0] for logprobs, n in zip(batch.old_logprobs, noise, strict=True)
        ]
        batch.micro_batches = [
            dataclasses.replace(m, generator_logprobs=logprobs + _GENERATOR_NOISE * n[1])
            for m, logprobs, n in zip(batch.micro_batches, batch.old_logprobs, noise, strict=True)
        ]
        if critic is not None:
            values = critic(batch.micro_batches)
            batch.values = [v + _VALUE_NOISE * n[2] for v, n in zip(values, noise, strict=True)]

    def _scorer(self, model: ShardedModel) -> LogprobScorer:
        return LogprobScorer(model, temperature=self.config.sampling.temperature)

    def _noise_of(self, micro_batch: MicroBatch, samples: Sequence[Sample]) -> torch.Tensor:
        """``[3, B, T]``: what belongs to each trained token, 0 elsewhere."""
        places = torch.tensor([[s.group_index, s.sample_index] for s in samples] or [[0, 0]])
        group, sample = places[micro_batch.sample_index.clamp(min=0)].unbind(-1)
        position = micro_batch.positions.clamp(max=LONGEST - 1)
        return torch.where(micro_batch.loss_mask, self._noise[:, group, sample, position], 0.0)

    def _laid_out(self, samples: Sequence[Sample], case: Case) -> list[MicroBatch]:
        if case.rows == "padded":
            return padded(samples, case.sizes)
        shape = row_shape(self.config)
        is_joined = case.rows == "joined"
        return pack(
            samples,
            [0.0] * len(samples),
            token_budget=self.config.training.seq_len,
            rows_per_micro_batch=max(len(samples), 1) if is_joined else shape.rows,
            length_multiple=shape.length_multiple,
            pad_to="token_budget" if shape.is_fixed else "longest",
            share_prompts=shares_prompts(self.config),
        )


def padded(samples: Sequence[Sample], sizes: Sequence[int]) -> list[MicroBatch]:
    """Rows of one sample each, all filled up to the longest possible.

    Args:
        samples: In order.
        sizes: Rows of the micro-batches, in order, the last repeated; 0 for all that are left.
    """
    micro_batches, start = [], 0
    while start < len(samples):
        size = sizes[min(len(micro_batches), len(sizes) - 1)] or len(samples)
        stop = min(start + size, len(samples))
        micro_batches.append(_stack(samples, start, stop))
        start = stop
    return micro_batches


def _stack(samples: Sequence[Sample], start: int, stop: int) -> MicroBatch:
    rows = [
        pack([sample], [0.0], token_budget=LONGEST, rows_per_micro_batch=1, pad_to="token_budget")[0]
        for sample in samples[start:stop]
    ]
    names = [f.name for f in dataclasses.fields(MicroBatch) if f.name not in _NOT_STACKED]
    index = torch.cat([row.sample_index for row in rows])
    numbers = torch.arange(start, stop)[:, None]
    return MicroBatch(
        **{name: torch.cat([getattr(row, name) for row in rows]) for name in names},
        sample_index=torch.where(index >= 0, numbers, -1),
        document_lengths=[row.document_lengths[0] for row in rows],
    )


_NOT_STACKED = ("sample_index", "document_lengths")


@torch.no_grad()
def randomise(model: ShardedModel, *, salt: str) -> None:
    """Draw every parameter by its name, alike under every layout; norms around 1.

    Args:
        model: Of the small architecture.
        salt: Empty for the policy; another model's weights are the policy's and a little of their own.
    """
    for part in model.parts:
        for wrapped, parameter in part.named_parameters():
            name = wrapped.replace("_checkpoint_wrapped_module.", "")
            value = _drawn(name, parameter.shape, "")
            if salt:
                value += _OTHER_MODEL * _drawn(name, parameter.shape, salt) / _WEIGHT_STD
            copy_full(parameter, value)


def _drawn(name: str, shape: torch.Size, salt: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(derive_seed(_SEED, name, salt))
    if "norm" in name:
        return torch.rand(tuple(shape), generator=generator) * (0.5 if not salt else _WEIGHT_STD) + (
            0.75 if not salt else 0.0
        )
    return _WEIGHT_STD * torch.randn(tuple(shape), generator=generator)


def _taken(model: ShardedModel, prefix: str) -> dict[str, torch.Tensor]:
    """Full gradients, which the model then no longer has."""
    gradients = {f"{prefix}{name}": g.clone().contiguous() for name, g in model.full_gradients()}
    for part in model.parts:
        part.zero_grad(set_to_none=True)
    return gradients
