"""Every unit of work belongs to one rank: generated once, kept once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.rollout.share import Share


@given(degree=st.integers(1, 4), num_generators=st.integers(1, 5), count=st.integers(0, 40))
def test_over_all_ranks_everything_is_generated_by_one_group_and_kept_by_one_rank(
    degree, num_generators, count
):
    world_size = degree * num_generators
    generated, kept = Counter(), Counter()
    for rank in range(world_size):
        share = Share.of_rank(rank, world_size, degree)
        mine = list(share.to_generate(count))
        generated.update(mine)
        kept.update(mine[position] for position in share.to_keep_among_generated(len(mine)))
    assert generated == dict.fromkeys(range(count), degree)  # the ranks of a group generate together
    assert kept == dict.fromkeys(range(count), 1)


@given(degree=st.integers(1, 4), num_generators=st.integers(1, 5), count=st.integers(0, 40))
def test_shares_differ_by_at_most_one_prompt(degree, num_generators, count):
    world_size = degree * num_generators
    shares = [Share.of_rank(rank, world_size, degree) for rank in range(world_size)]
    sizes = [len(share.to_generate(count)) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    for share, size in zip(shares, sizes, strict=True):
        kept = len(share.to_keep_among_generated(size))
        assert abs(kept - size / degree) < 1


@pytest.mark.parametrize("rank", range(6))
def test_ranks_of_one_generator_group_generate_the_same(rank):
    share, first = Share.of_rank(rank, 6, 3), Share.of_rank(rank // 3 * 3, 6, 3)
    assert share.to_generate(10) == first.to_generate(10)
    assert (share.generator_index, share.num_generators, share.member_index) == (rank // 3, 2, rank % 3)
