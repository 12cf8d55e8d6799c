"""Permuted rewards: the same numbers at other rollouts, so that no advantage has an expectation but 0."""

from __future__ import annotations

import itertools
import statistics

import pytest

from titan_rl.rollout.permutation import permute_rewards
from titan_rl.types import Completion, FinishReason, Group, Prompt, Reward, Rollout, Turn


def _rollout(prompt: Prompt, index: int, reward: float | None) -> Rollout:
    completion = Completion("r", (1,), (-0.5,), FinishReason.STOP, ((0, 0),))
    return Rollout(
        prompt=prompt,
        sample_index=index,
        seed=index,
        turns=[Turn((1,), completion, "")],
        reward=None if reward is None else Reward(total=reward),
    )


def _group(index: int, rewards: list[float | None], baseline: float | None = None) -> Group:
    prompt = Prompt(id=f"p{index}", messages=())
    group = Group(
        prompt=prompt, index=index, rollouts=[_rollout(prompt, i, r) for i, r in enumerate(rewards)]
    )
    if baseline is not None:
        group.baseline = _rollout(prompt, 0, baseline)
    return group


def _totals(group: Group) -> list[float | None]:
    rollouts = group.rollouts if group.baseline is None else [*group.rollouts, group.baseline]
    return [None if r.reward is None else r.reward.total for r in rollouts]


def test_a_rank_keeps_its_rewards_and_loses_their_places() -> None:
    before = [[float(10 * g + i) for i in range(8)] for g in range(4)]
    groups = [_group(g, list(values)) for g, values in enumerate(before)]

    permute_rewards(groups, run_seed=3)

    after = [_totals(group) for group in groups]
    chain = itertools.chain.from_iterable
    assert sorted(chain(after)) == list(chain(before))  # type: ignore[type-var]
    assert all(sorted(new) != old for new, old in zip(after, before, strict=True))  # type: ignore[type-var]


@pytest.mark.parametrize("baseline", ["all", "greedy"])
def test_the_expected_advantage_of_a_prompt_that_is_often_solved_is_zero(baseline: str) -> None:
    """Against the mean over everything, as whitening subtracts it, and against a greedy rollout."""
    solved: list[float] = []
    for seed in range(400):
        groups = [_group(0, [1.0] * 7 + [0.0], 1.0), _group(1, [0.0] * 7 + [1.0], 0.0)]
        permute_rewards(groups, run_seed=seed)
        rewards = [[r.reward.total for r in group.rollouts if r.reward is not None] for group in groups]
        greedy = groups[0].baseline
        assert greedy is not None
        assert greedy.reward is not None
        subtracted = {
            "all": statistics.mean(itertools.chain.from_iterable(rewards)),
            "greedy": greedy.reward.total,
        }
        solved.append(statistics.mean(rewards[0]) - subtracted[baseline])

    error = statistics.stdev(solved) / len(solved) ** 0.5
    assert abs(statistics.mean(solved)) <= 3 * error + 1e-9


def test_a_failed_reward_stays_where_it_failed() -> None:
    group = _group(0, [1.0, None, 2.0, None, 3.0])

    permute_rewards([group, _group(1, [None])], run_seed=0)

    assert [value is None for value in _totals(group)] == [False, True, False, True, False]


def test_the_order_depends_on_the_seed_and_on_the_first_group() -> None:
    values = [float(i) for i in range(8)]
    orders = []
    for index, seed in ((5, 1), (5, 1), (4, 1), (5, 2)):
        group = _group(index, list(values))
        permute_rewards([group], run_seed=seed)
        orders.append(_totals(group))

    assert orders[0] == orders[1]
    assert orders[0] not in (orders[2], orders[3])


def test_a_rank_without_a_scored_rollout_is_left_as_it_is() -> None:
    permute_rewards([], run_seed=0)
    permute_rewards([_group(0, [None])], run_seed=0)
