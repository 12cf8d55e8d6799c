"""From groups to batches: what is dropped, masked, skipped, split over steps, and scored by which model."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchtitan.config import ParallelismConfig

from tests.unit.rollout.rollout_fakes import make_prompts, make_rollout
from tests.unit.titan.trainer_fakes import one_part
from tests.unit.trainers.credit_fakes import Alone, advantages_of, by_rollout, make_groups, on_ranks
from titan_rl.algorithms.advantages import GAE, GreedyBaseline, GroupNormalized, Returns
from titan_rl.algorithms.aggregations import SampleMeanOfTokenMeans
from titan_rl.algorithms.penalties import EntropyBonus, KLPenalty
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import derive_needs
from titan_rl.algorithms.shaping import ShapingSection
from titan_rl.observability.stages import StageTimer
from titan_rl.policy.token_scores import LogprobScorer
from titan_rl.rollout.source import Taken
from titan_rl.titan.models import ModelSection, build_spec
from titan_rl.trainers import batch_maker, initial_weights
from titan_rl.trainers.batch_maker import BatchMaker
from titan_rl.trainers.sections import (
    AlgorithmSection,
    ReferenceSection,
    RLBatchingSection,
    SamplingSection,
)
from titan_rl.types import Group

REWARDS = {3: [1.0, 0.0, 0.5], 4: [2.0, None, 0.0, 1.0], 7: [0.25, 0.75], 9: [1.0, 1.0]}


class Model(nn.Module):
    """Hidden states of the token itself."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.states = nn.Parameter(torch.randn(32, 6, generator=generator))
        self.lm_head = nn.Linear(6, 32, bias=False)
        self.lm_head.weight.data = torch.randn(32, 6, generator=generator)

    def forward(self, tokens, *, positions):
        return self.states[tokens]


class Report:
    """Remembers what it is told."""

    def __init__(self):
        self.metrics, self.recorded, self.shares = {}, None, []

    def measured(self, metrics):
        self.metrics |= metrics

    def record(self, taken, advantages):
        self.recorded = dict(advantages)

    def packed(self, micro_batches, deal, *, attention_cost):
        self.shares.append((micro_batches, deal, attention_cost))


class Critic:
    """Values are the position; remembers the returns that it is shown."""

    def __init__(self):
        self.observed = None

    def __call__(self, micro_batches):
        return [torch.where(m.sample_index >= 0, m.positions.float(), 0.0) for m in micro_batches]

    def observe(self, returns, masks):
        self.observed = list(zip(returns, masks, strict=True))


def make_trainer(advantage=None, *, loss=None, shaping=None, collectives=None, **sections):
    steps = sections.pop("steps", 1)
    parallelism = ParallelismConfig(**sections.pop("parallelism", {}))
    algorithm = AlgorithmSection(steps_per_iteration=steps, **sections.pop("algorithm", {}))
    advantage = advantage or GroupNormalized(GroupNormalized.Config(normalise_std=False))
    loss_fn = (loss or PolicyLoss.Config()).build()
    needs = derive_needs(advantage, loss_fn, steps_per_iteration=steps)
    return SimpleNamespace(
        config=SimpleNamespace(
            sampling=SamplingSection(max_tokens=16),
            reference=ReferenceSection(),
            lora=None,
            shaping=shaping or ShapingSection(),
            algorithm=algorithm,
            batching=RLBatchingSection(**sections),
            teacher=None,
            model_spec=SimpleNamespace(model=None),
            training=SimpleNamespace(seq_len=24, local_batch_size=2),
            parallelism=parallelism,
        ),
        advantage=advantage,
        loss_fn=loss_fn,
        needs=needs,
        model_config=build_spec(ModelSection(name="llama3", flavor="debugmodel")).model,
        policy=one_part(Model(0)),
        critic=Critic() if needs.critic else None,
        collectives=collectives or Alone(),
        state=SimpleNamespace(dropped_groups=0, mean_mismatch=math.inf),
        timer=StageTimer(),
        checkpointer=SimpleNamespace(maybe_wait_for_staging=lambda: None),
        report=Report(),
        device=torch.device("cpu"),
    )


def make(trainer, groups, dropped=()):
    return BatchMaker(trainer).make(Taken(groups=list(groups), dropped=list(dropped)))


def k1(coefficient=0.3):
    return PolicyLoss.Config(kl=KLPenalty.Config(placement="reward", estimator="k1", coefficient=coefficient))


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    """The frozen copy is a model of other weights, so that it can be told from the policy."""
    model = one_part(Model(1))
    monkeypatch.setattr(initial_weights, "frozen_copy", lambda trainer, *, offload_to_cpu: model)
    return model


def score(model, micro_batch):
    return LogprobScorer(model, temperature=1.0)([micro_batch])[0]


# --------------------------------------------------------------------------- what is trained and what counts


def test_groups_with_too_few_rewards_are_dropped_and_counted_with_those_that_the_source_dropped():
    groups = make_groups({3: [1.0, None], 4: [None, None], 7: [1.0, 0.0]})
    trainer = make_trainer()
    (batch,) = make(trainer, groups, dropped=make_groups({9: [1.0, 1.0]}))
    assert {key[0] for key in advantages_of([batch])} == {7}
    assert trainer.state.dropped_groups == 3
    make(trainer, groups)
    assert trainer.state.dropped_groups == 5  # it adds up over iterations


def test_what_cannot_be_trained_on_is_handed_to_the_report_as_dropped():
    groups = make_groups({3: [1.0, None], 7: [1.0, 0.0], 4: [None, None]})
    taken = Taken(groups=list(groups), dropped=make_groups({9: [1.0, 1.0]}))
    BatchMaker(make_trainer()).make(taken)
    assert [group.index for group in taken.groups] == [7]
    assert [group.index for group in taken.dropped] == [9, 3, 4]


def test_an_advantage_that_needs_no_siblings_keeps_a_group_of_one():
    trainer = make_trainer(Returns(Returns.Config()))
    (batch,) = make(trainer, make_groups({3: [1.0, None], 4: [None, None], 7: [1.0]}))
    assert advantages_of([batch]).keys() == {(3, 0), (7, 0)}
    assert (batch.num_samples, trainer.state.dropped_groups) == (2, 1)


def test_a_group_whose_baseline_has_no_reward_is_dropped_and_counted():
    groups = make_groups({3: [1.0, 0.0], 7: [1.0, 0.0]})
    groups[0].baseline = make_rollout(reward=None)
    groups[1].baseline = make_rollout(reward=0.25)
    trainer = make_trainer(GreedyBaseline(GreedyBaseline.Config()))
    (batch,) = make(trainer, groups)
    found = advantages_of([batch])
    assert {key: values[0] for key, values in found.items()} == {(7, 0): 0.75, (7, 1): -0.25}
    assert trainer.state.dropped_groups == 1


def test_truncated_rollouts_count_in_the_baseline_and_nowhere_else_when_they_are_masked():
    groups = make_groups({3: [1.0, 0.0, 0.5]})
    cut = make_rollout(sample_index=1, tokens=(8, 9, 10, 11), reward=-5.0, is_truncated=True)
    groups[0].rollouts[1] = cut
    others = [len(groups[0].rollouts[i].turns[0].completion.token_ids) for i in (0, 2)]
    shaping = ShapingSection(mask_truncated=True)
    for counts, section in (((2, sum(others)), shaping), ((3, sum(others) + 4), ShapingSection())):
        (batch,) = make(make_trainer(shaping=section), groups)
        assert (batch.num_samples, batch.num_loss_tokens) == counts
        assert batch.num_computed_tokens == counts[1]
        assert advantages_of([batch])[3, 0][0] == pytest.approx(1.0 - (1.0 - 5.0 + 0.5) / 3, abs=1e-6)


def test_samples_without_a_gradient_are_left_out_and_still_count():
    groups = make_groups(REWARDS)
    (skipping,), (whole,) = (make(make_trainer(skip_zero_advantages=flag), groups) for flag in (True, False))
    left_out = {(4, 3), (3, 2), (9, 0), (9, 1)}  # at the mean of their group
    assert advantages_of([whole]).keys() - advantages_of([skipping]).keys() == left_out
    assert skipping.num_samples == whole.num_samples == 10
    assert skipping.num_loss_tokens == whole.num_loss_tokens == whole.num_computed_tokens
    assert skipping.num_computed_tokens < whole.num_computed_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"loss": PolicyLoss.Config(kl=KLPenalty.Config(coefficient=0.1))},
        {"loss": PolicyLoss.Config(entropy=EntropyBonus.Config(coefficient=0.1))},
        {"loss": k1()},
        {"shaping": ShapingSection(whiten=True)},
        {"advantage": Returns(Returns.Config())},
    ],
)
def test_nothing_is_left_out_where_an_advantage_of_zero_still_trains_or_is_not_known_yet(options):
    (batch,) = make(make_trainer(**options), make_groups(REWARDS))
    assert batch.num_computed_tokens == batch.num_loss_tokens
    assert len(batch.samples) == 10


def test_the_loss_is_the_same_with_and_without_the_samples_that_are_left_out():
    losses = []
    for flag in (True, False):
        config = PolicyLoss.Config(aggregation=SampleMeanOfTokenMeans.Config())
        trainer = make_trainer(skip_zero_advantages=flag, loss=config)
        (batch,) = make(trainer, make_groups(REWARDS))
        total = 0.0
        for m in batch.micro_batches:
            # The loss as the trainer computes it, with the advantage itself for a loss per token.
            total += float(
                trainer.loss_fn.aggregation(
                    SimpleNamespace(
                        loss_mask=m.loss_mask, sample_index=m.sample_index, num_samples=batch.num_samples
                    ),
                    m.advantages.abs(),
                )
            )
        losses.append(total)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] > 0.1


def test_an_iteration_without_any_reward_gives_steps_without_tokens():
    trainer = make_trainer(Returns(Returns.Config()), steps=3, shaping=ShapingSection(whiten=True), loss=k1())
    batches = make(trainer, make_groups({3: [None, None], 4: [None]}))
    assert [(b.num_loss_tokens, b.num_samples, b.micro_batches) for b in batches] == [(0, 0, [])] * 3
    assert trainer.report.recorded == {}


def test_equal_rewards_leave_a_step_that_is_still_a_step():
    (batch,) = make(make_trainer(), make_groups({9: [1.0, 1.0]}))
    assert (len(batch.micro_batches), batch.num_computed_tokens, batch.num_samples) == (1, 0, 2)
    assert batch.num_loss_tokens > 0


# ------------------------------------------------------------------------------------------ steps and ranks


def test_groups_are_split_over_the_steps_and_never_in_two():
    batches = make(make_trainer(steps=3, skip_zero_advantages=False), make_groups(REWARDS))
    per_step = [{sample.group_index for sample in batch.samples} for batch in batches]
    assert per_step == [{3, 4}, {7}, {9}]
    assert [batch.num_samples for batch in batches] == [6, 2, 2]
    assert all(len(batch.old_logprobs) == len(batch.micro_batches) for batch in batches)


@pytest.mark.parametrize("world", [2, 5])
def test_counts_are_of_all_ranks_and_all_have_as_many_micro_batches(world):
    groups = make_groups(REWARDS)
    (alone,) = make(make_trainer(skip_zero_advantages=False), groups)

    def work(rank, collectives):
        trainer = make_trainer(skip_zero_advantages=False, collectives=collectives)
        (batch,) = make(trainer, groups[rank::world], dropped=make_groups({20 + rank: [1.0, 1.0]}))
        return batch, trainer.state.dropped_groups

    found = on_ranks(world, work)
    assert {(b.num_samples, b.num_loss_tokens) for b, _ in found} == {
        (alone.num_samples, alone.num_loss_tokens)
    }
    assert len({len(b.micro_batches) for b, _ in found}) == 1
    assert {dropped for _, dropped in found} == {world}
    together = {}
    for batch, _ in found:
        together |= advantages_of([batch])
    assert together == advantages_of([alone])


@pytest.mark.parametrize("world", [2, 3, 9])
@pytest.mark.parametrize("lopsided", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": k1()},
        {"shaping": ShapingSection(whiten=True)},
        {"advantage": GAE(GAE.Config()), "loss": k1()},
        {"advantage": Returns(Returns.Config(gamma=0.5))},
    ],
)
def test_steps_advantages_and_records_are_those_of_one_rank(options, lopsided, world):
    """On nine ranks some have no group, and no sample of a step."""
    groups = make_groups(REWARDS)
    alone = make_trainer(steps=2, skip_zero_advantages=False, **options)
    expected = make(alone, groups)

    def work(rank, collectives):
        trainer = make_trainer(steps=2, skip_zero_advantages=False, collectives=collectives, **options)
        mine = groups[rank::world] if not lopsided else groups if rank == 1 else []
        batches = make(trainer, mine)
        recorded = trainer.report.recorded
        assert {index for index, _ in recorded} == {group.index for group in mine}
        return batches, recorded, trainer.report.shares

    found = on_ranks(world, work)
    for step, of_one in enumerate(expected):
        together = {}
        for batches, _, _ in found:
            together |= advantages_of([batches[step]])
        right = advantages_of([of_one])
        assert together.keys() == right.keys()
        for key, values in together.items():
            assert values == pytest.approx(right[key], abs=1e-5)
    records = {key: value for _, recorded, _ in found for key, value in recorded.items()}
    assert records == pytest.approx(alone.report.recorded, abs=1e-5)
    assert any(deal.moved_tokens for _, _, shares in found for _, deal, _ in shares)
    for step in range(2):
        assert len({len(batches[step].micro_batches) for batches, _, _ in found}) == 1


def test_a_shared_prompt_is_computed_once_for_its_group_on_one_of_two_ranks(monkeypatch):
    monkeypatch.setattr(batch_maker, "shares_prompts", lambda config: True)
    prompt = make_prompts(1)[0][1]
    groups = [
        Group(
            prompt,
            index,
            [
                make_rollout(prompt_tokens=(3,) * 20, tokens=(7,) * 5, sample_index=i, reward=float(i))
                for i in range(3)
            ],
        )
        for index in range(4)
    ]

    def work(rank, collectives):
        trainer = make_trainer(skip_zero_advantages=False, collectives=collectives)
        trainer.config.training.seq_len = 120
        (batch,) = make(trainer, groups if rank == 0 else [])
        return sum(m.num_tokens for m in batch.micro_batches)

    # Two groups each: 20 + 5 + 2 x (the prompt's last token and 5).
    assert on_ranks(2, work) == [74, 74]


@pytest.mark.parametrize("multiple", [1, 5, 12])
def test_rows_are_as_long_as_a_multiple_that_the_layout_asks_for(multiple):
    trainer = make_trainer(skip_zero_advantages=False, parallelism={"tensor_parallel_degree": multiple})
    trainer.config.training.seq_len = 60
    (batch,) = make(trainer, make_groups(REWARDS))
    lengths = {m.input_ids.shape[1] for m in batch.micro_batches}
    assert {length % multiple for length in lengths} == {0}
    assert max(lengths) < 60  # of the longest row, not of the budget
    assert advantages_of([batch]) == everything()


@pytest.mark.parametrize("rows", [1, 2])
def test_under_a_pipeline_all_micro_batches_have_one_shape(rows):
    parallelism = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": rows}
    trainer = make_trainer(skip_zero_advantages=False, parallelism=parallelism)
    trainer.config.training.seq_len = 9
    (batch,) = make(trainer, make_groups(REWARDS))
    assert {tuple(m.input_ids.shape) for m in batch.micro_batches} == {(rows, 9)}
    assert len(batch.micro_batches) >= 2
    assert advantages_of([batch]) == everything()


def everything():
    return advantages_of(make(make_trainer(skip_zero_advantages=False), make_groups(REWARDS)))


def test_a_rank_without_samples_gets_micro_batches_of_the_shape_of_the_others():
    groups = make_groups(REWARDS)

    def work(rank, collectives):
        trainer = make_trainer(collectives=collectives, parallelism={"pipeline_parallel_degree": 2})
        trainer.config.training.seq_len = 9
        (batch,) = make(trainer, groups if rank == 0 else [])
        return [tuple(m.input_ids.shape) for m in batch.micro_batches]

    full, empty = on_ranks(2, work)
    assert full == empty == [(1, 9)] * len(full)
    assert len(full) >= 2


# -------------------------------------------------------------------------------------------------- scores


def test_without_a_need_nothing_is_scored():
    (batch,) = make(make_trainer(), make_groups(REWARDS))
    assert (batch.old_logprobs, batch.ref_logprobs, batch.values, batch.returns) == ([], [], [], [])


def test_old_and_reference_are_scored_by_their_own_models(reference):
    trainer = make_trainer(steps=2, loss=PolicyLoss.Config(kl=KLPenalty.Config(coefficient=0.1)))
    for batch in make(trainer, make_groups(REWARDS)):
        for i, micro_batch in enumerate(batch.micro_batches):
            assert torch.equal(batch.old_logprobs[i], score(trainer.policy, micro_batch))
            assert torch.equal(batch.ref_logprobs[i], score(reference, micro_batch))
            assert not torch.equal(batch.old_logprobs[i], batch.ref_logprobs[i])


def test_a_penalty_in_the_reward_is_that_of_the_policy_against_the_reference(reference):
    trainer = make_trainer(Returns(Returns.Config()), loss=k1(0.3))
    groups = make_groups({3: [1.0], 7: [0.0]})
    (batch,) = make(trainer, groups)
    difference = by_rollout(
        [batch],
        lambda b: [score(trainer.policy, m) - score(reference, m) for m in b.micro_batches],
    )
    for key, values in advantages_of([batch]).items():
        reward = 1.0 if key[0] == 3 else 0.0
        expected = [reward - 0.3 * sum(difference[key][t:]) for t in range(len(values))]
        assert values == pytest.approx(expected, abs=1e-5)
    flat = [d for values in difference.values() for d in values]
    assert trainer.report.metrics["reward/kl_mean"] == pytest.approx(sum(flat) / len(flat), abs=1e-5)


@pytest.mark.parametrize(
    ("old_logprobs", "mismatch", "from_generator", "warns"),
    [
        ("recompute", 1e-9, False, False),
        ("generator", math.inf, False, False),  # not measured yet
        ("generator", 1e-3, True, False),
        ("generator", 1.1e-3, False, True),
    ],
)
def test_the_generator_s_log_probabilities_are_taken_while_they_agree(
    old_logprobs, mismatch, from_generator, warns, caplog
):
    trainer = make_trainer(steps=2, algorithm={"old_logprobs": old_logprobs, "max_mismatch": 1e-3})
    trainer.state.mean_mismatch = mismatch
    with caplog.at_level(logging.WARNING):
        batches = make(trainer, make_groups(REWARDS))
    for batch in batches:
        for old, micro_batch in zip(batch.old_logprobs, batch.micro_batches, strict=True):
            expected = (
                micro_batch.generator_logprobs if from_generator else score(trainer.policy, micro_batch)
            )
            assert torch.equal(old, expected)
    assert ("are recomputed in this iteration" in caplog.text) is warns


def test_a_critic_values_every_token_and_sees_the_returns_of_all_steps():
    trainer = make_trainer(GAE(GAE.Config()), steps=2)
    groups = make_groups(REWARDS)
    batches = make(trainer, groups)
    rewards = {
        (g.index, r.sample_index): r.reward.total for g in groups for r in g.rollouts if r.reward is not None
    }
    for key, targets in by_rollout(batches, lambda batch: batch.returns).items():
        assert targets == pytest.approx([rewards[key]] * len(targets))
    values = by_rollout(
        batches, lambda b: [v * m.loss_mask for v, m in zip(b.values, b.micro_batches, strict=True)]
    )
    for key, advantages in advantages_of(batches).items():
        expected = [rewards[key] - value for value in values[key]]
        assert advantages == pytest.approx(expected, abs=1e-5)
    micro_batches = [m for batch in batches for m in batch.micro_batches]
    assert len(trainer.critic.observed) == len(micro_batches) >= 2
    for (observed, mask), expected, m in zip(
        trainer.critic.observed, [r for b in batches for r in b.returns], micro_batches, strict=True
    ):
        assert torch.equal(observed, expected)
        assert torch.equal(mask, m.loss_mask)


@pytest.mark.parametrize("shaping", [ShapingSection(), ShapingSection(whiten=True)])
def test_what_is_recorded_is_what_is_trained_on(shaping):
    trainer = make_trainer(shaping=shaping, skip_zero_advantages=False)
    (batch,) = make(trainer, make_groups(REWARDS))
    expected = {key: values[0] for key, values in advantages_of([batch]).items()}
    assert trainer.report.recorded == pytest.approx(expected, abs=1e-6)
    assert len(trainer.report.shares) == 1
