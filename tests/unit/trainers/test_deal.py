"""Samples on their way to the rank that trains them, and numbers about them there and back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainers.credit_fakes import Alone, make_groups, on_ranks
from titan_rl.batching.pack import pack, units_of
from titan_rl.rollout.samples import to_samples
from titan_rl.trainers.deal import Deal, from_bytes, to_bytes
from titan_rl.types import Sample

REWARDS = {index: [1.0, 0.0, 0.5] for index in (3, 4, 7, 9, 12)}


def key(sample):
    return sample.group_index, sample.sample_index


@given(
    st.lists(
        st.builds(
            lambda n, reward, group, index, cut: Sample(
                [2**40 * (i % 2) + i for i in range(n)],
                [i > 1 for i in range(n)],
                [-i / 7 for i in range(n)],
                reward,
                group,
                index,
                cut,
            ),
            st.integers(1, 9),
            st.floats(allow_nan=False),
            st.integers(0, 2**40),
            st.integers(0, 99),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_samples_arrive_equal_in_every_field(samples):
    assert from_bytes(to_bytes(samples)) == samples


def test_one_rank_keeps_its_samples_in_their_order():
    samples = to_samples(make_groups(REWARDS))
    deal = Deal(samples, attention_cost=0.1, collectives=Alone())
    assert deal.held == samples
    assert deal.moved_tokens == 0
    values = [float(i) for i in range(len(samples))]
    assert deal.to_holders(values) == deal.to_owners(values) == values


@pytest.mark.parametrize("world", [2, 3, 4, 16])
@pytest.mark.parametrize("only", [None, 1])
def test_every_sample_is_trained_once_and_numbers_find_it_there_and_back(world, only):
    """On sixteen ranks one has no sample; with ``only`` all samples come from one rank."""
    groups = make_groups(REWARDS)

    def work(rank, collectives):
        mine = groups[rank::world] if only is None else groups if rank == only else []
        samples = to_samples(mine)
        deal = Deal(samples, attention_cost=0.1, collectives=collectives)
        there = deal.to_holders([100.0 * s.group_index + s.sample_index for s in samples])
        back = deal.to_owners([-value for value in there])
        return samples, deal, there, back

    found = on_ranks(world, work)
    held = [sample for _, deal, _, _ in found for sample in deal.held]
    assert sorted(held, key=key) == to_samples(groups)
    for samples, deal, there, back in found:
        assert there == [100.0 * s.group_index + s.sample_index for s in deal.held]
        assert back == [-(100.0 * s.group_index + s.sample_index) for s in samples]
    own = {key(sample): rank for rank, (samples, *_) in enumerate(found) for sample in samples}
    for rank, (_, deal, _, _) in enumerate(found):
        moved = [len(s.token_ids) for s in deal.held if own[key(s)] != rank]
        assert deal.moved_tokens == sum(moved)
    tokens = [sum(len(s.token_ids) for s in deal.held) for _, deal, _, _ in found]
    assert max(tokens) - min(tokens) <= max(len(s.token_ids) for s in held)
    assert (0 in tokens) == (world == 16)


def test_a_number_that_is_none_survives():
    deal = Deal(to_samples(make_groups({3: [1.0]})), attention_cost=0.0, collectives=Alone())
    assert math.isnan(deal.to_holders([math.nan])[0])


def siblings(group, prompt, completions):
    """Samples of one group."""
    return [
        Sample(
            [group] * prompt + [50 + index] * count,
            [False] * prompt + [True] * count,
            [0.0] * prompt + [-0.5] * count,
            0.0,
            group,
            index,
            False,
        )
        for index, count in enumerate(completions)
    ]


@pytest.mark.parametrize(
    ("groups", "num_together", "tokens"),
    [
        # Of prompts of 20 one rank has two and computes each once: 20 + 5 + 2 x (5 + 1), twice.
        ([[5, 5, 5]] * 4, 4, [74, 74]),
        # The eight of one prompt go to both: 20 + 9 + 3 x (9 + 1) each.
        ([[9] * 8], 0, [59, 59]),
    ],
)
def test_siblings_share_a_prompt_on_the_rank_that_trains_them(groups, num_together, tokens):
    together = [s for index, of_group in enumerate(groups) for s in siblings(index, 20, of_group)]

    def work(rank, collectives):
        samples = together if rank == 0 else []
        units = units_of(samples, budget=120, share_prompts=True)
        deal = Deal(samples, attention_cost=0.1, collectives=collectives, units=units)
        numbers = [float(i) for i in range(len(samples))]
        assert deal.to_owners(deal.to_holders(numbers)) == numbers
        packed = pack(
            deal.held, [0.0] * len(deal.held), token_budget=120, rows_per_micro_batch=1, share_prompts=True
        )
        return deal.held, sum(batch.num_tokens for batch in packed)

    found = on_ranks(2, work)
    assert sorted((s for held, _ in found for s in held), key=key) == together
    ranks_of = [
        sum(any(s.group_index == index for s in held) for held, _ in found) for index in range(len(groups))
    ]
    assert ranks_of.count(1) == num_together
    assert [count for _, count in found] == tokens
