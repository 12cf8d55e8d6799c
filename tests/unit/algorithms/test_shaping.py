"""Rewards before the advantage: scale, bound, punishment of length. Advantages after it: weights of sets."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rollout.rollout_fakes import make_group, make_rollout
from titan_rl.algorithms.shaping import ShapingSection, group_rewards, set_weight, shape_reward

REWARDS = st.floats(-100, 100)


def shaped(reward=1.0, num_tokens=10, max_tokens=16, **options):
    section = ShapingSection(**options)
    return shape_reward(reward, num_tokens=num_tokens, section=section, max_tokens=max_tokens)


@given(reward=REWARDS, num_tokens=st.integers(0, 64))
def test_by_default_a_reward_stays_as_it_is(reward, num_tokens):
    assert shaped(reward, num_tokens) == reward


def test_scale_comes_first_then_the_bound():
    assert shaped(3.0, reward_scale=0.5) == 1.5
    assert shaped(3.0, reward_scale=0.5, reward_clip=1.25) == 1.25
    assert shaped(-3.0, reward_scale=0.5, reward_clip=1.25) == -1.25
    assert shaped(1.0, reward_scale=-2.0, reward_clip=5.0) == -2.0


@pytest.mark.parametrize(
    ("num_tokens", "punishment"),
    [(0, 0.0), (16384, 0.0), (16385, 1 / 4096), (18432, 0.5), (20480, 1.0)],
)
def test_the_punishment_of_length_is_equation_13_of_dapo_with_its_numbers(num_tokens, punishment):
    options = {"max_tokens": 20480, "overlong_buffer_tokens": 4096}
    assert shaped(1.0, num_tokens, **options) == pytest.approx(1.0 - punishment, abs=1e-12)
    assert shaped(1.0, num_tokens, overlong_penalty=0.5, **options) == pytest.approx(1.0 - punishment / 2)


def test_the_punishment_is_neither_scaled_nor_bounded():
    options = {"reward_scale": 10.0, "reward_clip": 0.25, "overlong_buffer_tokens": 4}
    assert shaped(-1.0, 16, **options) == -0.25 - 1.0
    assert shaped(-1.0, 14, **options) == -0.25 - 0.5


def test_a_buffer_as_long_as_the_limit_punishes_every_token():
    assert [shaped(0.0, n, max_tokens=4, overlong_buffer_tokens=4) for n in range(5)] == [
        0.0, -0.25, -0.5, -0.75, -1.0,
    ]  # fmt: skip


@given(reward=REWARDS, tokens=st.tuples(st.integers(0, 32), st.integers(0, 32)), buffer=st.integers(1, 32))
def test_a_longer_completion_never_earns_more(reward, tokens, buffer):
    short, long = sorted(tokens)
    options = {"max_tokens": 32, "overlong_buffer_tokens": buffer}
    assert shaped(reward, long, **options) <= shaped(reward, short, **options)


def groups():
    first, second = make_group(4, [1.0, None, -2.0]), make_group(5, [None, None])
    first.rollouts[0] = make_rollout(tokens=(1, 2, 3, 4), reward=1.0, is_truncated=True)
    first.baseline = make_rollout(tokens=(1, 2, 3), reward=0.5)
    return [first, second]


def test_an_advantage_sees_the_scored_rollouts_only_with_their_lengths_and_shaped_baseline():
    section = ShapingSection(reward_scale=2.0, overlong_buffer_tokens=2)
    first, second = group_rewards(groups(), section, 4)
    assert first.rewards == [2.0 - 1.0, -4.0]
    assert first.num_tokens == [4, 2]
    assert first.baseline == 1.0 - 0.5
    assert (second.rewards, second.num_tokens, second.baseline) == ([], [], None)


def test_penalties_are_subtracted_after_shaping_from_their_own_rollout():
    section = ShapingSection(reward_scale=2.0, reward_clip=1.0)
    first, _ = group_rewards(groups(), section, 16, {(4, 2): 0.25, (5, 2): 9.0, (4, 1): 9.0})
    assert first.rewards == [1.0, -1.0 - 0.25]


def test_truncated_rollouts_count_in_what_the_advantage_sees_also_when_they_are_masked():
    masked = group_rewards(groups(), ShapingSection(mask_truncated=True), 16)
    assert masked == group_rewards(groups(), ShapingSection(), 16)
    assert masked[0].rewards == [1.0, -2.0]


def test_a_baseline_without_a_reward_is_not_a_number_and_never_zero():
    group = groups()[0]
    group.baseline = make_rollout(reward=None)
    assert math.isnan(group_rewards([group], ShapingSection(), 16)[0].baseline)


@pytest.mark.parametrize(
    ("metadata", "weight"),
    [({"prompt_set": "hard"}, 2.5), ({"prompt_set": "easy"}, 1.0), ({}, 1.0), ({"prompt_set": 3}, 0.5)],
)
def test_a_prompt_set_has_its_weight_and_others_have_one(metadata, weight):
    section = ShapingSection(prompt_set_weights={"hard": 2.5, "3": 0.5})
    group = make_group(0, [1.0])
    group.prompt = replace(group.prompt, metadata=metadata)
    assert set_weight(group, section) == weight
    assert set_weight(group, ShapingSection()) == 1.0
