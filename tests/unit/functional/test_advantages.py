"""Advantages of a group: hand-computed numbers and properties."""

import math
import statistics

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from titan_rl.functional.advantages import (
    against_baseline,
    best_of_group,
    group_normalized,
    leave_one_out,
    length_weighted,
)

REWARDS = st.lists(st.floats(-100.0, 100.0), min_size=2, max_size=16)


def _advantages(rewards, **options):
    return group_normalized(torch.tensor(rewards, dtype=torch.float64), **options).tolist()


def test_one_right_answer_among_four_by_hand():
    # mean 0.25; sum of squares 0.75; Bessel-corrected deviation sqrt(0.75 / 3) = 0.5.
    assert _advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert _advantages([1.0, 0.0, 0.0, 0.0], normalise_std=False) == [0.75, -0.25, -0.25, -0.25]


def test_eps_is_added_to_the_deviation():
    assert _advantages([1.0, 0.0, 0.0, 0.0], eps=0.5) == pytest.approx([0.75, -0.25, -0.25, -0.25])


@given(REWARDS)
def test_it_equals_the_statistics_of_the_standard_library(rewards):
    assume(max(rewards) - min(rewards) > 1e-3)
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    expected = [(reward - mean) / (deviation + 1e-6) for reward in rewards]
    assert _advantages(rewards) == pytest.approx(expected, abs=1e-8)


@given(REWARDS, st.booleans())
def test_advantages_of_a_group_add_up_to_zero(rewards, normalise_std):
    assert math.fsum(_advantages(rewards, normalise_std=normalise_std)) == pytest.approx(0, abs=1e-5)


@given(st.floats(-1e6, 1e6), st.integers(2, 16), st.booleans())
def test_equal_rewards_give_exactly_zero(reward, size, normalise_std):
    assert _advantages([reward] * size, normalise_std=normalise_std) == [0.0] * size


def test_a_nan_reward_is_not_hidden():
    assert all(math.isnan(value) for value in _advantages([1.0, float("nan")]))


@pytest.mark.parametrize("shape", [(1,), (0,), (2, 2)])
def test_what_is_not_a_group_is_refused(shape):
    with pytest.raises(ValueError, match="rewards must be a vector of at least 2"):
        group_normalized(torch.zeros(shape))


@given(REWARDS)
def test_leaving_one_out_is_the_mean_of_the_others_and_centring_times_g_over_g_minus_1(rewards):
    found = leave_one_out(torch.tensor(rewards, dtype=torch.float64)).tolist()
    total, size = math.fsum(rewards), len(rewards)
    assert found == pytest.approx([r - (total - r) / (size - 1) for r in rewards], abs=1e-9)
    centred = _advantages(rewards, normalise_std=False)
    assert found == pytest.approx([size / (size - 1) * value for value in centred], abs=1e-9)


@given(REWARDS, st.integers(1, 50))
def test_with_equal_lengths_the_weighted_mean_is_the_mean(rewards, length):
    values = torch.tensor(rewards, dtype=torch.float64)
    found = length_weighted(values, torch.full((len(rewards),), length)).tolist()
    assert found == pytest.approx(_advantages(rewards, normalise_std=False), abs=1e-9)


def test_length_weights_by_hand():
    # (2 * 1 + 6 * 0 + 2 * 0.5) / 10 = 0.3
    found = length_weighted(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([2, 6, 2]))
    assert found.tolist() == pytest.approx([0.7, -0.3, 0.2])


def test_lengths_that_are_all_zero_count_as_equal():
    assert length_weighted(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])).tolist() == [0.5, -0.5]


@given(REWARDS)
def test_only_a_single_best_rollout_learns_and_earns_its_lead(rewards):
    found = best_of_group(torch.tensor(rewards, dtype=torch.float64)).tolist()
    first, second = sorted(rewards, reverse=True)[:2]
    assert found == [first - second if reward == first else 0.0 for reward in rewards]
    assert sum(value > 0 for value in found) <= 1


def test_a_baseline_is_subtracted():
    assert against_baseline(torch.tensor([1.0, 0.25]), torch.tensor(0.75)).tolist() == [0.25, -0.5]


@given(st.floats(-1e6, 1e6), st.integers(2, 16))
def test_equal_rewards_give_exactly_zero_in_every_group_advantage(reward, size):
    values = torch.full((size,), reward)
    assert not leave_one_out(values).any()
    assert not length_weighted(values, torch.arange(1, size + 1)).any()
    assert not best_of_group(values).any()


@pytest.mark.parametrize("function", [leave_one_out, best_of_group])
def test_a_rollout_without_siblings_is_refused(function):
    with pytest.raises(ValueError, match="rewards must be a vector of at least 2"):
        function(torch.ones(1))
