"""Which token gets which advantage: rewards, penalties, whitening, over layouts, steps and ranks."""

import math
from dataclasses import dataclass

import pytest
import torch

from tests.unit.rollout.rollout_fakes import make_rollout
from tests.unit.trainers.credit_fakes import (
    Alone,
    advantages_of,
    by_rollout,
    make_batches,
    make_groups,
    on_ranks,
    tokens_of,
)
from titan_rl.algorithms.advantages import GAE, GroupNormalized, LeaveOneOut, Returns
from titan_rl.algorithms.interfaces import Needs, TokenCredit
from titan_rl.algorithms.penalties import KLPenalty
from titan_rl.algorithms.shaping import ShapingSection
from titan_rl.trainers.credit import Credit, mean_by_rollout, spread

REWARDS = {3: [1.0, 0.0, 0.5], 4: [2.0, None, 0.0, 1.0], 7: [0.25, 0.75], 9: [1.0, 1.0, 4.0]}
CENTRED = GroupNormalized.Config(normalise_std=False)
BETA = 0.3


def make_credit(advantage, *, kl=None, collectives=None, **shaping):
    return Credit(
        advantage,
        ShapingSection(**shaping),
        kl_in_reward=kl,
        max_tokens=16,
        collectives=collectives or Alone(),
    )


def k1(coefficient=BETA):
    return KLPenalty(KLPenalty.Config(placement="reward", estimator="k1", coefficient=coefficient))


def centred():
    return GroupNormalized(CENTRED)


def returns(gamma=1.0):
    return Returns(Returns.Config(gamma=gamma))


def gae(**options):
    return GAE(GAE.Config(**options))


def penalties(groups):
    """beta (old - ref) at every trained token of every rollout."""
    old, ref = tokens_of(groups, "old"), tokens_of(groups, "ref")
    return {key: [BETA * (o - r) for o, r in zip(old[key], ref[key], strict=True)] for key in old}


def rewards_of(groups):
    return {
        (g.index, r.sample_index): r.reward.total for g in groups for r in g.rollouts if r.reward is not None
    }


def centre(rewards):
    """Reward minus the mean of its group."""
    found = {}
    for (group, sample), reward in rewards.items():
        siblings = [other for key, other in rewards.items() if key[0] == group]
        found[group, sample] = reward - sum(siblings) / len(siblings)
    return found


def assert_same(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, abs=tolerance), key


# ------------------------------------------------------------------------------------------- per rollout


@pytest.mark.parametrize(
    ("advantage", "kl", "whiten", "expected"),
    [
        (centred(), None, False, False),
        (centred(), None, True, True),
        (centred(), k1(), False, True),
        (returns(), None, False, True),
        (gae(), None, False, True),
    ],
)
def test_scores_are_needed_for_penalties_whitening_and_advantages_per_token(advantage, kl, whiten, expected):
    assert make_credit(advantage, kl=kl, whiten=whiten).needs_scores is expected


def test_an_advantage_per_rollout_is_known_without_scores():
    groups = make_groups(REWARDS)
    found = make_credit(centred()).of_rollouts(groups)
    assert found == pytest.approx(centre(rewards_of(groups)))
    assert (4, 1) not in found  # it has no reward, and its siblings' mean is without it
    assert found[4, 0] == pytest.approx(1.0)


def test_rewards_are_shaped_first_and_advantages_weighted_last():
    groups = make_groups(REWARDS, metadata={3: {"prompt_set": "hard"}})
    credit = make_credit(centred(), reward_scale=2.0, reward_clip=2.5, prompt_set_weights={"hard": 10.0})
    bounded = {key: min(2 * reward, 2.5) for key, reward in rewards_of(groups).items()}
    expected = {key: a * (10.0 if key[0] == 3 else 1.0) for key, a in centre(bounded).items()}
    assert credit.of_rollouts(groups) == pytest.approx(expected)


@pytest.mark.parametrize("layout", [{"token_budget": 16, "rows": 2}, {"token_budget": 64, "rows": 1}])
def test_an_advantage_per_rollout_stands_at_all_its_trained_tokens(layout):
    groups = make_groups(REWARDS)
    batches = make_batches(groups, **layout)
    make_credit(centred(), kl=k1(0.0)).assign(groups, batches)
    lengths = {key: len(values) for key, values in tokens_of(groups, "old").items()}
    expected = {key: [a] * lengths[key] for key, a in centre(rewards_of(groups)).items()}
    assert_same(advantages_of(batches), expected)


def test_a_penalty_lowers_the_reward_of_a_rollout_by_its_sum_over_the_tokens():
    groups = make_groups(REWARDS)
    batches = make_batches(groups, steps=2)
    make_credit(LeaveOneOut(LeaveOneOut.Config()), kl=k1()).assign(groups, batches)
    rewards, costs = rewards_of(groups), penalties(groups)
    net = {key: reward - sum(costs[key]) for key, reward in rewards.items()}
    expected = {}
    for (group, sample), own in net.items():
        others = [other for key, other in net.items() if key[0] == group and key[1] != sample]
        expected[group, sample] = [own - sum(others) / len(others)] * len(costs[group, sample])
    assert_same(advantages_of(batches), expected)
    plain = make_credit(LeaveOneOut(LeaveOneOut.Config())).of_rollouts(groups)
    assert max(abs(plain[key] - values[0]) for key, values in expected.items()) > 0.1


# --------------------------------------------------------------------------------------------- per token


class Recording:
    """An advantage per token that keeps what it was shown."""

    needs = Needs()

    def __init__(self):
        self.shown = []

    def __call__(self, groups):
        return [float(r) for group in groups for r in group.rewards]

    def over_tokens(self, tokens):
        self.shown.append(tokens)
        return TokenCredit(torch.zeros_like(tokens.rewards), None)


@pytest.mark.parametrize("layout", [{"token_budget": 9, "rows": 1}, {"token_budget": 32, "rows": 3}])
def test_what_a_rollout_earns_stands_at_its_last_trained_token(layout):
    groups = make_groups(REWARDS)
    recording, batches = Recording(), make_batches(groups, **layout)
    make_credit(recording).assign(groups, batches)
    (batch,) = batches
    assert len(recording.shown) == len(batch.micro_batches)
    documents = [len(row) for m in batch.micro_batches for row in m.document_lengths]
    assert max(documents) >= 2
    found = by_rollout(batches, lambda _: [tokens.rewards for tokens in recording.shown])
    expected = {
        key: [0.0] * (len(values) - 1) + [rewards_of(groups)[key]]
        for key, values in tokens_of(groups, "old").items()
    }
    assert_same(found, expected)
    assert max(len(values) for values in expected.values()) >= 4
    assert min(len(values) for values in expected.values()) == 1


def test_a_penalty_per_token_lowers_each_token_s_reward():
    groups = make_groups(REWARDS)
    recording, batches = Recording(), make_batches(groups)
    make_credit(recording, kl=k1()).assign(groups, batches)
    found = by_rollout(batches, lambda _: [tokens.rewards for tokens in recording.shown])
    costs, rewards = penalties(groups), rewards_of(groups)
    expected = {key: [-c for c in values] for key, values in costs.items()}
    for key, values in expected.items():
        values[-1] += rewards[key]
    assert_same(found, expected)
    assert all(tokens.values is not None for tokens in recording.shown)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_returns_to_go_are_of_rewards_less_penalties(gamma):
    groups = make_groups(REWARDS)
    batches = make_batches(groups, steps=3)
    make_credit(returns(gamma), kl=k1()).assign(groups, batches)
    costs, rewards, expected = penalties(groups), rewards_of(groups), {}
    for key, values in costs.items():
        after, to_go = 0.0, []
        for t in reversed(range(len(values))):
            after = -values[t] + (rewards[key] if t == len(values) - 1 else 0.0) + gamma * after
            to_go.append(after)
        expected[key] = to_go[::-1]
    assert_same(advantages_of(batches), expected)
    assert all(batch.returns == [] for batch in batches)


@pytest.mark.parametrize("kl", [None, k1()])
def test_gae_is_of_rewards_less_penalties_and_gives_the_critic_its_returns(kl):
    groups = make_groups(REWARDS)
    batches = make_batches(groups, steps=2)
    make_credit(gae(gamma=0.9, lambda_policy=0.7), kl=kl).assign(groups, batches)
    costs, values, rewards = penalties(groups), tokens_of(groups, "value"), rewards_of(groups)
    expected, expected_returns = {}, {}
    for key, v in values.items():
        advantage = to_go = next_value = 0.0
        advantages, targets = [], []
        for t in reversed(range(len(v))):
            reward = rewards[key] if t == len(v) - 1 else 0.0
            reward -= costs[key][t] if kl else 0.0
            advantage = reward + 0.9 * next_value - v[t] + 0.9 * 0.7 * advantage
            to_go = reward + 0.9 * to_go  # lambda of the critic is 1
            next_value = v[t]
            advantages.append(advantage)
            targets.append(to_go)
        expected[key], expected_returns[key] = advantages[::-1], targets[::-1]
    assert_same(advantages_of(batches), expected)
    assert_same(by_rollout(batches, lambda batch: batch.returns), expected_returns)


def test_a_prompt_set_weighs_the_advantages_and_not_what_the_critic_learns():
    metadata = {4: {"prompt_set": "hard"}}
    plain, weighted = make_groups(REWARDS), make_groups(REWARDS, metadata=metadata)
    found = {}
    for name, groups in {"plain": plain, "weighted": weighted}.items():
        batches = make_batches(groups)
        credit = make_credit(gae(), kl=k1(), prompt_set_weights={"hard": 4.0})
        credit.assign(groups, batches)
        found[name] = advantages_of(batches), by_rollout(batches, lambda batch: batch.returns)
    expected = {
        key: [a * (4.0 if key[0] == 4 else 1.0) for a in values] for key, values in found["plain"][0].items()
    }
    assert_same(found["weighted"][0], expected)
    assert_same(found["weighted"][1], found["plain"][1])


# ----------------------------------------------------------------------------------------------- whitening


def moments(batches):
    values = [a for tokens in advantages_of(batches).values() for a in tokens]
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((a - mean) ** 2 for a in values) / (len(values) - 1))


@pytest.mark.parametrize("advantage", [centred, returns, gae])
def test_advantages_are_whitened_over_all_steps_of_the_iteration(advantage):
    groups = make_groups(REWARDS)
    plain, whitened = make_batches(groups, steps=3), make_batches(groups, steps=3)
    make_credit(advantage(), kl=k1()).assign(groups, plain)
    make_credit(advantage(), kl=k1(), whiten=True).assign(groups, whitened)
    mean, std = moments(plain)
    expected = {key: [(a - mean) / std for a in values] for key, values in advantages_of(plain).items()}
    assert_same(advantages_of(whitened), expected)
    assert moments(whitened) == pytest.approx((0.0, 1.0), abs=1e-5)
    # Not step by step.
    assert max(abs(moments([batch])[0]) for batch in whitened) > 0.05


@pytest.mark.parametrize("advantage", [centred, returns, gae])
@pytest.mark.parametrize("world", [2, 5])
def test_any_number_of_ranks_assigns_the_same(advantage, world):
    """Five ranks: one of them has nothing."""
    groups = make_groups(REWARDS)
    alone = make_batches(groups, steps=1)
    metrics = make_credit(advantage(), kl=k1(), whiten=True).assign(groups, alone)

    def work(rank, collectives):
        mine = groups[rank::world]
        batches = make_batches(mine, steps=1, collectives=collectives)
        credit = make_credit(advantage(), kl=k1(), whiten=True, collectives=collectives)
        return credit.assign(mine, batches), batches

    found = on_ranks(world, work)
    together = {}
    for of_rank, batches in found:
        assert of_rank == pytest.approx(metrics, abs=1e-6)
        together |= advantages_of(batches)
    assert_same(together, advantages_of(alone))


def test_planted_fault_whitening_of_each_rank_alone_is_noticed():
    groups = make_groups(REWARDS)
    alone = make_batches(groups)
    make_credit(returns(), whiten=True).assign(groups, alone)
    local = {}
    for rank in range(2):
        mine = groups[rank::2]
        batches = make_batches(mine)
        make_credit(returns(), whiten=True).assign(mine, batches)
        local |= advantages_of(batches)
    with pytest.raises(AssertionError):
        assert_same(local, advantages_of(alone))


# ------------------------------------------------------------------------------------- metrics and extremes


def test_the_mean_penalty_is_reported_without_its_coefficient():
    groups = make_groups(REWARDS)
    metrics = make_credit(centred(), kl=k1()).assign(groups, make_batches(groups, steps=2))
    costs = [c for values in penalties(groups).values() for c in values]
    assert metrics["reward/kl_mean"] == pytest.approx(sum(costs) / len(costs) / BETA, abs=1e-6)
    assert metrics["reward/kl_coefficient"] == BETA
    assert make_credit(centred(), whiten=True).assign(groups, make_batches(groups)) == {}


def test_the_coefficient_is_that_of_the_moment():
    groups, kl = make_groups(REWARDS), k1()
    credit, found = make_credit(returns(), kl=kl), []
    for coefficient in (0.0, 5.0):
        kl.coefficient = coefficient
        batches = make_batches(groups)
        credit.assign(groups, batches)
        found.append(advantages_of(batches))
    difference = found[0][9, 2][0] - found[1][9, 2][0]
    assert difference == pytest.approx(5.0 / BETA * sum(penalties(groups)[9, 2]), abs=1e-5)


def test_truncated_rollouts_count_in_the_baseline_and_have_no_token():
    groups = make_groups({3: [1.0, 0.0, 0.5]})
    groups[0].rollouts[1] = make_rollout(sample_index=1, reward=-5.0, is_truncated=True)
    batches = make_batches(groups, mask_truncated=True)
    make_credit(centred(), kl=k1(0.0), mask_truncated=True).assign(groups, batches)
    found = advantages_of(batches)
    mean = (1.0 - 5.0 + 0.5) / 3
    assert {key: values[0] for key, values in found.items()} == pytest.approx(
        {(3, 0): 1.0 - mean, (3, 2): 0.5 - mean}, abs=1e-6
    )
    assert batches[0].num_samples == 2


@pytest.mark.parametrize("advantage", [centred, returns, gae])
def test_a_step_or_an_iteration_without_samples_assigns_nothing(advantage):
    groups = make_groups({3: [1.0, 0.0]})
    batches = make_batches(groups, steps=3)
    assert [len(batch.samples) for batch in batches] == [2, 0, 0]
    make_credit(advantage(), kl=k1(), whiten=True).assign(groups, batches)
    assert len(advantages_of(batches)) == 2
    nothing = make_batches([], steps=2)
    metrics = make_credit(advantage(), kl=k1(), whiten=True).assign([], nothing)
    assert metrics["reward/kl_mean"] == 0.0
    assert advantages_of(nothing) == {}


@pytest.mark.parametrize("advantage", [centred, returns])
def test_equal_rewards_whiten_to_zero(advantage):
    groups = make_groups({3: [1.0, 1.0, 1.0], 4: [1.0, 1.0]})
    batches = make_batches(groups)
    make_credit(advantage(), whiten=True).assign(groups, batches)
    assert {a for values in advantages_of(batches).values() for a in values} == {0.0}


def test_spread_puts_nothing_where_nothing_is_trained():
    groups = make_groups(REWARDS)
    (batch,) = make_batches(groups)
    for micro_batch in batch.micro_batches:
        values = spread(torch.full((len(batch.samples),), math.inf), micro_batch)
        assert torch.equal(values.isinf(), micro_batch.loss_mask)


def test_the_record_is_the_mean_over_the_tokens_of_each_rollout_in_the_batches():
    groups = make_groups(REWARDS)
    batches = make_batches(groups, steps=2)
    make_credit(returns(0.5), kl=k1()).assign(groups, batches)
    expected = {key: sum(values) / len(values) for key, values in advantages_of(batches).items()}
    assert mean_by_rollout(batches) == pytest.approx(expected, abs=1e-6)


@dataclass
class _Constant:
    """A user's own advantage per rollout."""

    needs = Needs()

    def __call__(self, groups):
        return [7.0 for group in groups for _ in group.rewards]


def test_an_advantage_of_one_s_own_needs_nothing_but_the_call():
    groups = make_groups(REWARDS)
    assert set(make_credit(_Constant()).of_rollouts(groups).values()) == {7.0}
