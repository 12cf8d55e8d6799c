"""Advantages as parts: hand-computed numbers, uneven and small groups, and what stands at the tokens."""

import math

import pytest
import torch

from titan_rl.algorithms.advantages import (
    GAE,
    GreedyBaseline,
    GroupNormalized,
    LeaveOneOut,
    LengthWeighted,
    NoAdvantage,
    Returns,
)
from titan_rl.algorithms.interfaces import GroupRewards, Needs, TokenAdvantage, TokenRewards

GROUPS = [GroupRewards([3.0, 0.0, 0.0, 1.0], [1, 2, 3, 4]), GroupRewards([2.0, 5.0], [6, 2])]
# Row 0: prompt, 3 tokens; prompt, 1 token; padding. Row 1: 2 tokens; padding.
MASK = torch.tensor([[0, 1, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 0, 0]]).bool()
INDEX = torch.tensor([[4, 4, 4, 4, 7, 7, -1], [2, 2, 2, -1, -1, -1, -1]])


def make(part, **options):
    return part(part.Config(**options))


def tokens(rewards, values=None, dtype=torch.float64):
    def tensor(x):
        # What is not trained must not be looked at.
        return torch.where(MASK, torch.tensor(x, dtype=dtype), math.nan)

    return TokenRewards(
        rewards=tensor(rewards),
        loss_mask=MASK,
        sample_index=INDEX,
        values=None if values is None else tensor(values),
    )


REWARDS = [[0.0, 0.5, 0.0, 2.0, 0.0, -1.0, 0.0], [0.25, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
VALUES = [[0.0, 1.0, 0.5, 1.5, 0.0, -0.5, 0.0], [0.5, 0.75, 0.0, 0.0, 0.0, 0.0, 0.0]]


def test_group_normalized_by_hand():
    std = math.sqrt((2**2 + 1 + 1 + 0) / 3)
    expected = [2 / std, -1 / std, -1 / std, 0, -1.5 / math.sqrt(4.5), 1.5 / math.sqrt(4.5)]
    assert make(GroupNormalized)(GROUPS) == pytest.approx(expected, abs=1e-5)
    assert make(GroupNormalized, normalise_std=False)(GROUPS) == pytest.approx([2, -1, -1, 0, -1.5, 1.5])


def test_leave_one_out_by_hand():
    expected = [3 - 1 / 3, 0 - 4 / 3, 0 - 4 / 3, 1 - 3 / 3, 2 - 5, 5 - 2]
    assert make(LeaveOneOut)(GROUPS) == pytest.approx(expected)


def test_length_weighted_by_hand():
    first, second = (3 * 1 + 1 * 4) / 10, (2 * 6 + 5 * 2) / 8
    expected = [3 - first, -first, -first, 1 - first, 2 - second, 5 - second]
    assert make(LengthWeighted)(GROUPS) == pytest.approx(expected)


def test_greedy_baseline_by_hand():
    groups = [GroupRewards([3.0, 0.0], baseline=1.0), GroupRewards([2.0], baseline=-0.5)]
    assert make(GreedyBaseline)(groups) == pytest.approx([2, -1, 2.5])


def test_a_missing_baseline_is_refused():
    with pytest.raises(ValueError, match="baseline must be given"):
        make(GreedyBaseline)([GroupRewards([3.0, 0.0])])


def test_no_advantage_is_zero_for_every_rollout():
    assert make(NoAdvantage)(GROUPS) == [0.0] * 6


@pytest.mark.parametrize("part", [Returns, GAE])
def test_outcomes_of_advantages_per_token_are_the_rewards(part):
    assert make(part)(GROUPS) == [3.0, 0.0, 0.0, 1.0, 2.0, 5.0]
    assert isinstance(make(part), TokenAdvantage)


@pytest.mark.parametrize("part", [GroupNormalized, LeaveOneOut, LengthWeighted])
def test_what_compares_siblings_says_so_and_gives_a_lonely_rollout_nothing(part):
    assert make(part).needs == Needs(smallest_group=2)
    assert not isinstance(make(part), TokenAdvantage)
    groups = [GroupRewards([7.0], [3]), GroupRewards([], []), GroupRewards([1.0, 1.0, 1.0], [1, 2, 0])]
    assert make(part)(groups) == [0.0] * 4


@pytest.mark.parametrize("part", [GroupNormalized, LeaveOneOut, LengthWeighted])
def test_equal_rewards_give_exactly_zero_also_where_their_mean_is_rounded(part):
    assert make(part)([GroupRewards([0.1] * 7, [1, 2, 3, 4, 5, 6, 7])]) == [0.0] * 7


@pytest.mark.parametrize("part", [GroupNormalized, LeaveOneOut, LengthWeighted])
def test_a_constant_added_to_all_rewards_changes_nothing(part):
    shifted = [GroupRewards([r + 8.0 for r in g.rewards], g.num_tokens) for g in GROUPS]
    assert make(part)(shifted) == pytest.approx(make(part)(GROUPS), abs=1e-9)


@pytest.mark.parametrize("part", [Returns, GAE, GreedyBaseline, NoAdvantage])
def test_what_needs_no_siblings_takes_groups_of_one(part):
    assert make(part).needs.smallest_group == 1


def test_what_the_others_need():
    assert make(GAE).needs == Needs(critic=True)
    assert make(GreedyBaseline).needs == Needs(greedy_baseline=True)
    assert make(Returns).needs == make(NoAdvantage).needs == Needs()


@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
def test_returns_to_go_by_hand(gamma):
    credit = make(Returns, gamma=gamma).over_tokens(tokens(REWARDS))
    g = gamma
    expected = [[0, 0.5 + 2 * g**2, 2 * g, 2, 0, -1, 0], [0.25 + g, 1, 0, 0, 0, 0, 0]]
    assert credit.advantages.tolist() == [pytest.approx(row) for row in expected]
    assert credit.returns is None


def loop(*, gamma, decay, decay_critic):
    """GAE token by token, backwards over the trained tokens of each sample (Schulman et al. 2015, eq. 16)."""
    advantages, returns = torch.zeros(MASK.shape).double(), torch.zeros(MASK.shape).double()
    for row in range(2):
        for sample in INDEX[row].unique().tolist():
            columns = [c for c in range(7) if MASK[row, c] and INDEX[row, c] == sample]
            next_value = after = after_critic = 0.0
            for column in reversed(columns):
                value = VALUES[row][column]
                delta = REWARDS[row][column] + gamma * next_value - value
                lam = decay(len(columns)) if callable(decay) else decay
                after = delta + gamma * lam * after
                after_critic = delta + gamma * decay_critic * after_critic
                advantages[row, column], returns[row, column] = after, value + after_critic
                next_value = value
    return advantages, returns


@pytest.mark.parametrize(
    ("gamma", "decay", "decay_critic"), [(1.0, 1.0, 1.0), (0.9, 0.8, 1.0), (0.5, 0.0, 0.3), (1.0, 0.95, 0.95)]
)
def test_gae_equals_the_loop_with_a_lambda_of_its_own_for_the_critic(gamma, decay, decay_critic):
    part = make(GAE, gamma=gamma, lambda_policy=decay, lambda_critic=decay_critic)
    credit = part.over_tokens(tokens(REWARDS, VALUES))
    advantages, returns = loop(gamma=gamma, decay=decay, decay_critic=decay_critic)
    torch.testing.assert_close(credit.advantages, advantages, rtol=0, atol=1e-12)
    torch.testing.assert_close(credit.returns, returns, rtol=0, atol=1e-12)


def test_gae_with_lambda_one_is_the_return_minus_the_value():
    credit = make(GAE).over_tokens(tokens(REWARDS, VALUES))
    to_go = make(Returns).over_tokens(tokens(REWARDS)).advantages
    assert credit.returns.tolist() == [pytest.approx(row) for row in to_go.tolist()]
    expected = torch.where(MASK, to_go - torch.tensor(VALUES).double(), 0.0)
    torch.testing.assert_close(credit.advantages, expected, rtol=0, atol=1e-12)


def test_a_length_adaptive_lambda_replaces_that_of_the_policy_alone():
    part = make(GAE, lambda_policy=0.123, lambda_critic=1.0, length_adaptive_alpha=0.5)
    credit = part.over_tokens(tokens(REWARDS, VALUES, dtype=torch.float32))

    def decay(length):
        return max(1 - 1 / (0.5 * length), 0.0)

    assert decay(3) == pytest.approx(1 / 3)
    advantages, returns = loop(gamma=1.0, decay=decay, decay_critic=1.0)
    torch.testing.assert_close(credit.advantages.double(), advantages, rtol=0, atol=1e-6)
    torch.testing.assert_close(credit.returns.double(), returns, rtol=0, atol=1e-6)


def test_gae_without_values_is_refused():
    with pytest.raises(ValueError, match="values must be given"):
        make(GAE).over_tokens(tokens(REWARDS))
