"""Splitting an iteration over its optimiser steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.batching.steps import split_into_steps
from titan_rl.types import Sample


def _samples(group_indices):
    return [Sample([0, 1], [False, True], [0.0, -1.0], 0.0, index, 0, False) for index in group_indices]


def test_whole_groups_go_to_steps_in_the_order_of_their_indices():
    assert split_into_steps(_samples([4, 4, 2, 9, 2, 9, 7]), 2) == [[0, 1, 2, 4], [3, 5, 6]]


def test_the_groups_of_other_ranks_count():
    assert split_into_steps(_samples([4, 9, 4]), 2, group_indices=[1, 2, 3, 4, 9, 4]) == [[], [0, 1, 2]]
    assert split_into_steps(_samples([4, 9, 4]), 2, group_indices=[4, 7, 8, 9]) == [[0, 2], [1]]


@given(st.lists(st.integers(0, 6), max_size=30), st.integers(1, 5))
def test_steps_partition_the_samples_keep_siblings_together_and_differ_by_one_group(indices, num_steps):
    steps = split_into_steps(_samples(indices), num_steps)
    assert sorted(index for step in steps for index in step) == list(range(len(indices)))
    groups = [{indices[index] for index in step} for step in steps]
    assert sum(map(len, groups)) == len(set(indices))
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_more_steps_than_groups_leave_empty_steps():
    assert split_into_steps(_samples([3]), 3) == [[0], [], []]


def test_zero_steps_are_refused():
    with pytest.raises(ValueError, match="num_steps must be at least 1"):
        split_into_steps([], 0)
