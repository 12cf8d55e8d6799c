"""One optimiser step of every named algorithm, in any layout and on any number of ranks, and planted faults.

tests/numerics/test_algorithm_invariance.py computes with it in one process, test_algorithms_two_ranks.py on
two ranks too; see launching.py.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.distributed import fsdp_worker, launching
from tests.distributed.comparing import uneven_norms
from tests.distributed.fsdp_worker import TEMPERATURE, VOCAB, Rank, build, leaking, whole_gradients
from tests.distributed.steps import SizedLoss, SizedValueLoss, Step
from titan_rl.algorithms import registries
from titan_rl.algorithms.corrections import (
    MaskedTokens,
    RejectNegativeSamples,
    RejectSamplesByGeometricMean,
    RejectSamplesByMeanK3,
    RejectTokens,
    TruncatedSamples,
    TruncatedTokens,
)
from titan_rl.algorithms.penalties import EntropyBonus
from titan_rl.algorithms.preset import AlgorithmPreset
from titan_rl.batching.micro_batch import MicroBatch
from titan_rl.batching.pack import pack, units_of
from titan_rl.config.choice import build as build_part
from titan_rl.config.registry import resolve
from titan_rl.policy.critic import Critic, build_critic
from titan_rl.policy.teacher import Teacher
from titan_rl.policy.token_scores import LogprobScorer
from titan_rl.rollout.samples import to_samples
from titan_rl.titan.branches import Pieces
from titan_rl.titan.collectives import Collectives
from titan_rl.titan.models import build_sibling, copy_shards
from titan_rl.titan.sharded_model import ShardedModel
from titan_rl.titan.weights import load_hf
from titan_rl.trainers.credit import Credit
from titan_rl.trainers.deal import Deal
from titan_rl.trainers.optimization import StepBatch, align_ranks, forward_backward, reduce_metrics
from titan_rl.trainers.row_shape import row_shape
from titan_rl.types import Completion, FinishReason, Group, Message, Prompt, Reward, Rollout, Sample, Turn

NAMES = tuple(registries.ALGORITHMS)
LAYOUTS = ("eight_of_one", "one_of_eight", "packed", "shared")
# Tokens of prompt and completion of every rollout: three groups, uneven throughout, eight rollouts. A prompt
# of one token leaves siblings nothing to share.
GROUPS = (((6, 10), (6, 1), (6, 6)), ((1, 4), (1, 16), (1, 2)), ((7, 5), (7, 8)))
REWARDS = ((1.0, 0.0, 0.25), (2.0, -0.5, 0.75), (0.0, 1.5))
LONGEST = max(p + c for group in GROUPS for p, c in group)
ROW_TOKENS = 30
COEFFICIENT = 0.1
CORRECTIONS: dict[str, dict[str, Any]] = {
    "dapo": {"correction": TruncatedTokens.Config(cap=1.05)},
    "dr_grpo": {"correction": TruncatedSamples.Config(cap=1.05)},
    "cispo": {"correction": MaskedTokens.Config(low=0.9, high=1.1)},
    "sapo": {"correction": TruncatedTokens.Config(), "rejection": RejectTokens.Config(low=0.9, high=1.1)},
    "gmpo": {"rejection": RejectSamplesByGeometricMean.Config(low=0.98, high=1.02)},
    "rloo": {"rejection": RejectSamplesByMeanK3.Config(max_kl=0.005)},
    "reinforce_pp": {"rejection": RejectNegativeSamples.Config(max_kl=0.02)},
}
ENTROPY = {"grpo": 0.05, "ppo": 0.02}


def write_model(directory: Path, *, initializer_range: float = 0.3) -> None:
    """A random model, its norms not all one."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    uneven_norms(model)
    model.save_pretrained(directory / "model")


def make_groups() -> list[Group]:
    """The same on every rank; siblings share their prompt."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB - 1, (count,), generator=generator).tolist())

    def rollout(prompt: Prompt, start: tuple[int, ...], length: int, sample: int, reward: float) -> Rollout:
        completion = Completion("r", tokens(length), (0.0,) * length, FinishReason.STOP, ((0, 0),))
        return Rollout(prompt, sample, 0, [Turn(start, completion, "")], Reward(reward))

    groups = []
    for index, (lengths, rewards) in enumerate(zip(GROUPS, REWARDS, strict=True)):
        prompt = Prompt(f"p{index}", (Message("user", "x"),))
        start = tokens(lengths[0][0])
        rollouts = [
            rollout(prompt, start, length, sample, reward)
            for sample, ((_, length), reward) in enumerate(zip(lengths, rewards, strict=True))
        ]
        group = Group(prompt, index, rollouts, start)
        group.baseline = rollout(prompt, start, 3, 0, 0.4)
        groups.append(group)
    return groups


def preset_of(name: str) -> AlgorithmPreset:
    """The named algorithm with its penalty on, and with a correction or an entropy bonus for some."""
    preset = resolve(name, registries.ALGORITHMS, "algorithm.type")()
    loss: Any = preset.loss
    loss.kl.coefficient = COEFFICIENT
    loss.entropy = EntropyBonus.Config(coefficient=ENTROPY.get(name, 0.0))
    for part, config in CORRECTIONS.get(name, {}).items():
        setattr(loss, part, config)
    return preset


def lay_out(samples: Sequence[Sample], layout: str) -> list[MicroBatch]:
    """Micro-batches of these samples."""
    if layout in ("packed", "shared"):
        return pack(
            samples,
            [0.0] * len(samples),
            token_budget=ROW_TOKENS,
            rows_per_micro_batch=1,
            share_prompts=layout == "shared",
        )
    rows = {"eight_of_one": 1, "one_of_eight": 8}[layout]
    return [_padded(samples, start, start + rows) for start in range(0, len(samples), rows)]


def _padded(samples: Sequence[Sample], start: int, stop: int) -> MicroBatch:
    """One sample a row, without packing."""
    options: Any = {"token_budget": LONGEST, "rows_per_micro_batch": 1, "pad_to": "token_budget"}
    alone = [pack([sample], [0.0], **options)[0] for sample in samples[start:stop]]
    names = ("input_ids", "positions", "targets", "loss_mask", "generator_logprobs", "advantages")
    index = torch.cat([row.sample_index for row in alone])
    numbers = torch.arange(start, start + len(alone))[:, None]
    return MicroBatch(
        **{name: torch.cat([getattr(row, name) for row in alone]) for name in names},
        sample_index=torch.where(index >= 0, numbers, -1),
        document_lengths=[row.document_lengths[0] for row in alone],
    )


class Setup:
    """A policy, a reference, a teacher and a critic of other weights, and steps of any algorithm."""

    def __init__(self, directory: Path, **options: Any) -> None:
        """Load everything.

        Args:
            directory: Of :func:`write_model`.
            options: As for :func:`fsdp_worker.without_models`.
        """
        self.sizes = defaultdict[str, float](float)
        self.rank = self.load(directory, options)
        self.rank.policy.skip_head()
        self.collectives = Collectives(self.rank.parallel_dims, torch.device("cpu"))
        self.groups = make_groups()
        reference, teacher = self._changed(0.05), self._changed(0.1)
        self.teacher = Teacher(Teacher.Config(), model=teacher, temperature=TEMPERATURE)
        shape = len(self.groups), max(map(len, GROUPS)), LONGEST
        generator = torch.Generator().manual_seed(4)

        def noise(scale: float) -> torch.Tensor:
            return scale * torch.randn(shape, generator=generator)

        # By group, sample and position, so that they belong to the token.
        self.tables = {"old": self.scores_of(self.rank.policy) + noise(0.4), "ref": self.scores_of(reference)}
        self.tables["generator"] = self.tables["old"] + noise(0.1)
        self.tables["value"] = noise(1.0)

    def load(self, directory: Path, options: dict[str, Any]) -> Rank:
        """Build the policy, and give it its weights."""
        rank = build(directory / "model", **options)
        load_hf(rank.policy, rank.adapter, str(directory / "model"))
        return rank

    @cached_property
    def critic(self) -> Critic:
        critic = build_critic(
            Critic.Config(head_init_std=0.3),
            self.rank,
            policy=self.rank.policy,
            collectives=self.collectives,
            seed=11,
            total_steps=10,
        )
        critic._loss = SizedValueLoss(critic._loss, self.sizes)
        return critic

    def _changed(self, scale: float) -> ShardedModel:
        """A frozen model with other weights, alike under every layout."""
        model = build_sibling(self.rank)
        copy_shards(self.rank.policy, model)
        with torch.device("meta"):
            whole = [name for name, _ in self.rank.model_config.build().named_parameters()]
        for part in model.parts:
            for name, parameter in part.named_parameters():
                with torch.no_grad():
                    fsdp_worker._shard(parameter).mul_(1.0 + scale * (whole.index(name) % 5))
        return model

    def scores_of(self, model: ShardedModel) -> torch.Tensor:
        """Log-probabilities of all groups' tokens, by group, sample and position. Every rank scores all."""
        samples = to_samples(self.groups)
        micro_batches = self.laid_out(samples, "packed")
        table = torch.zeros(len(self.groups), max(map(len, GROUPS)), LONGEST)
        for micro_batch, values in zip(
            micro_batches, LogprobScorer(model, temperature=TEMPERATURE)(micro_batches), strict=True
        ):
            mask = micro_batch.loss_mask
            places = zip(
                micro_batch.sample_index[mask].tolist(), micro_batch.positions[mask].tolist(), strict=True
            )
            for (index, position), value in zip(places, values[mask], strict=True):
                table[samples[index].group_index, samples[index].sample_index, position] = value
        return table

    def laid_out(self, samples: Sequence[Sample], layout: str) -> list[MicroBatch]:
        """Micro-batches in a layout, or as the parallelism of the rank asks for."""
        shape = row_shape(self.rank.config)
        if shape.is_fixed or shape.length_multiple > 1:
            return pack(
                samples,
                [0.0] * len(samples),
                token_budget=self.rank.config.training.seq_len,
                rows_per_micro_batch=shape.rows,
                length_multiple=shape.length_multiple,
                pad_to="token_budget" if shape.is_fixed else "longest",
                share_prompts=layout == "shared",
            )
        return lay_out(samples, layout)

    def batch(self, name: str, layout: str, *, only: int | None = None, is_dealt: bool = True) -> StepBatch:
        """What this rank trains in a layout, scored, with the advantages of the algorithm.

        Args:
            name: Of the algorithm.
            layout: One of ``LAYOUTS``.
            only: The rank that has all groups and trains them; by default they are shared.
            is_dealt: Whether samples of shared groups go to the ranks by their cost, as in a run.
        """
        mine = self.groups[self.collectives.data_rank :: self.collectives.data_size]
        if only is not None:
            mine = self.groups if self.collectives.data_rank == only else []
        samples, deal = to_samples(mine), None
        if is_dealt and only is None:
            units = units_of(samples, budget=ROW_TOKENS, share_prompts=layout == "shared")
            deal = Deal(samples, attention_cost=0.05, collectives=self.collectives, units=units)
            samples = deal.held
        batch = align_ranks(
            self.laid_out(samples, layout),
            num_samples=len(samples),
            collectives=self.collectives,
            device=self.rank.device,
            empty_shape=row_shape(self.rank.config).empty,
        )
        batch.samples, batch.deal = samples, deal
        batch.micro_batches = [
            dataclasses.replace(m, generator_logprobs=self._look_up("generator", m, samples))
            for m in batch.micro_batches
        ]
        for key in ("old", "ref"):
            setattr(batch, f"{key}_logprobs", [self._look_up(key, m, samples) for m in batch.micro_batches])
        preset = preset_of(name)
        advantage, loss_fn = build_part(preset.advantage), preset.loss.build()
        if advantage.needs.critic:
            batch.values = [
                values * m.loss_mask + self._look_up("value", m, samples)
                for m, values in zip(batch.micro_batches, self.critic(batch.micro_batches), strict=True)
            ]
        credit = Credit(
            advantage,
            preset.shaping,
            kl_in_reward=loss_fn.kl if loss_fn.kl.is_in_reward else None,
            max_tokens=LONGEST,
            collectives=self.collectives,
        )
        credit.assign(mine, [batch])
        return batch

    def _look_up(self, name: str, micro_batch: MicroBatch, samples: Sequence[Sample]) -> torch.Tensor:
        """``[B, T]`` of a table: what belongs to each trained token."""
        places = torch.tensor([[s.group_index, s.sample_index] for s in samples] or [[0, 0]])
        place = places[micro_batch.sample_index.clamp(min=0)]
        position = micro_batch.positions.clamp(max=LONGEST - 1)
        return torch.where(
            micro_batch.loss_mask, self.tables[name][place[..., 0], place[..., 1], position], 0.0
        )

    def step(self, name: str, batch: StepBatch) -> Step:
        """Loss, metrics and gradients of policy and critic."""
        self.sizes.clear()
        return self._taken(batch, self._backward(name, batch))

    def _backward(self, name: str, batch: StepBatch) -> list[dict[str, torch.Tensor]]:
        preset = preset_of(name)
        parts = forward_backward(
            self.rank.policy,
            SizedLoss(preset.loss, sizes=self.sizes, compile_config=self.rank.config.compile),
            batch,
            temperature=TEMPERATURE,
            max_tokens=LONGEST,
            teacher=self.teacher if preset.loss.distillation.coefficient > 0 else None,
        )
        if batch.returns:
            held = [p.grad for p in self.critic.model.parameters()]  # accumulate() starts from none
            self.critic.accumulate(
                batch.micro_batches,
                returns=batch.returns,
                old_values=batch.values,
                num_loss_tokens=batch.num_loss_tokens,
            )
            for parameter, before in zip(self.critic.model.parameters(), held, strict=True):
                if before is not None:
                    parameter.grad += before
        return parts

    def _taken(self, batch: StepBatch, parts: list[dict[str, torch.Tensor]]) -> Step:
        metrics = reduce_metrics(parts, batch, self.collectives)
        gradients = whole_gradients(self.rank.policy)
        if batch.returns:
            gradients |= {f"critic.{n}": g for n, g in whole_gradients(self.critic.model).items()}
        return Step(metrics["loss/loss"], metrics, gradients, dict(self.sizes))

    # ------------------------------------------------------------------------------------ planted faults

    def mean_per_micro_batch(self, name: str, batch: StepBatch) -> Step:
        """Every micro-batch is a mean of its own, and the step is the mean of those."""
        parts, count = [], len(batch.micro_batches)
        for i, micro_batch in enumerate(batch.micro_batches):
            tokens = self.collectives.reduce_scalar(micro_batch.num_loss_tokens, "sum")
            samples = self.collectives.reduce_scalar(
                len(micro_batch.sample_index[micro_batch.loss_mask].unique()), "sum"
            )
            part = StepBatch(
                [micro_batch],
                num_loss_tokens=int(tokens) * count,
                num_samples=int(samples) * count,
                num_computed_tokens=batch.num_computed_tokens,
                **{
                    key: getattr(batch, key)[i : i + 1]
                    for key in ("old_logprobs", "ref_logprobs", "values", "returns")
                },
            )
            parts += self._backward(name, part)
        return self._taken(batch, parts)

    def local_counts(self, name: str, batch: StepBatch) -> Step:
        """The counts are those of the rank, and the step is the mean of the ranks."""
        size = self.collectives.data_size
        faulty = dataclasses.replace(
            batch,
            num_loss_tokens=sum(m.num_loss_tokens for m in batch.micro_batches) * size,
            num_samples=len(batch.samples) * size,
        )
        return self.step(name, faulty)

    def leaking(self, name: str, batch: StepBatch) -> Step:
        """Attention sees one document a row, in the policy and in the critic."""
        critic = leaking(self.critic.model) if batch.returns else nullcontext()
        with leaking(self.rank.policy), critic:
            return self.step(name, batch)

    def misreading_branches(self, name: str, batch: StepBatch, *, fault: str) -> Step:
        """Rows that share prompts, in a model that takes what follows a prompt for one piece.

        Args:
            name: Of the algorithm.
            batch: In the layout ``shared``.
            fault: ``"masks"``: a completion sees its siblings before it; ``"positions"``: its tokens stand
                where they lie in the row.
        """
        models = [self.rank.policy, *([self.critic.model] if batch.returns else [])]
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(_misreading(model, fault))
            return self.step(name, batch)


@contextmanager
def _misreading(model: Any, fault: str) -> Iterator[None]:
    def prepare(rows: Any) -> Any:
        inputs, kwargs, index = ShardedModel.prepare(model, rows)
        place = torch.arange(rows.positions.shape[1]).expand_as(rows.positions)
        running = place - Pieces.of(rows.positions).document_start
        wrong = {"masks": ("attention_masks", model.parts[0].get_attention_masks(running))}
        key, value = wrong.get(fault, ("positions", running))
        return inputs, kwargs | {key: value}, index

    model.prepare = prepare
    try:
        yield
    finally:
        del model.prepare


def run(directory: Path) -> None:
    """Every algorithm on this rank; rank 0 writes."""
    setup, tensors, rest = Setup(directory), dict[str, torch.Tensor](), dict[str, Any]()
    for name in NAMES:
        batch = setup.batch(name, "packed")
        steps = {
            "packed": setup.step(name, batch),
            "one_rank_empty": setup.step(name, setup.batch(name, "packed", only=0)),
            # Dealt, both ranks may happen to have as many.
            "local_counts": setup.local_counts(name, setup.batch(name, "packed", is_dealt=False)),
        }
        rest["moved_tokens"] = setup.collectives.reduce_scalar(batch.deal.moved_tokens, "sum")
        for case, step in steps.items():
            tensors |= {f"{name}/{case}/{key}": value for key, value in step.gradients.items()}
            rest[f"{name}/{case}"] = {"loss": step.loss, "metrics": step.metrics}
    launching.write(directory, rest, tensors)
