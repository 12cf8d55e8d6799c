"""Samples on their way to the rank that trains them, and numbers about them there and back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainers.credit_fakes import Alone, make_groups, on_ranks
from titan_rl.batching.pack import units_of
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


@pytest.mark.parametrize("world", [2, 3])
def test_siblings_that_share_a_prompt_are_trained_on_one_rank(world):
    """Groups 4 and 7 have prompts of two tokens, 3 and 9 of one, which leaves nothing to share."""
    groups = make_groups(REWARDS | {10: [1.0, 0.0, 0.5, 2.0], 13: [1.0, 1.0]})

    def work(rank, collectives):
        samples = to_samples(groups if rank == 0 else [])
        units = units_of(samples, budget=64, share_prompts=True)
        deal = Deal(samples, attention_cost=0.1, collectives=collectives, units=units)
        assert deal.to_owners(deal.to_holders([float(i) for i in range(len(samples))])) == [
            float(i) for i in range(len(samples))
        ]
        return deal.held

    held = on_ranks(world, work)
    assert sorted((s for of_rank in held for s in of_rank), key=key) == sorted(to_samples(groups), key=key)
    for index in (4, 7, 10, 13):
        assert sum(any(s.group_index == index for s in of_rank) for of_rank in held) == 1
    work_of = [sum(len(s.token_ids) for s in of_rank) for of_rank in held]
    assert min(work_of) > 0
