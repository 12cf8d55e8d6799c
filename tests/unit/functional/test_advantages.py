"""Group-normalised advantages: hand-computed numbers and properties."""

import math
import statistics

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from titan_rl.functional.advantages import group_normalized

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
