"""Which groups dynamic sampling keeps."""

import pytest

from tests.unit.rollout.rollout_fakes import make_group, make_rollout
from titan_rl.algorithms.refill import RefillSection, has_signal


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([1.0, 0.0], True),
        ([1.0, 1.0, 1.0, 1.0 - 1e-12], True),
        ([1.0, None, 0.0], True),
        ([1.0, 1.0], False),
        ([0.0, -0.0], False),
        ([1.0, None, 1.0], False),
        ([1.0, None], False),
        ([1.0], False),
        ([None, None], False),
    ],
)
def test_a_group_is_kept_when_its_rewards_differ(rewards, kept):
    assert has_signal(make_group(0, rewards)) is kept


def test_a_group_whose_baseline_has_no_reward_is_not_kept():
    group = make_group(0, [1.0, 0.0])
    group.baseline = make_rollout(reward=0.5)
    assert has_signal(group)
    group.baseline = make_rollout(reward=None)
    assert not has_signal(group)


@pytest.mark.parametrize(("baseline", "kept"), [(1.0, False), (0.0, True)])
def test_equal_rewards_teach_where_the_baseline_differs(baseline, kept):
    group = make_group(0, [1.0, 1.0])
    group.baseline = make_rollout(reward=baseline)
    assert has_signal(group) is kept


def test_it_is_off_unless_asked_for():
    assert RefillSection().max_rounds == 0
