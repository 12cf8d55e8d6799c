"""Permuted rewards: the same numbers in every group, at other rollouts, whatever the layout."""

from __future__ import annotations

from titan_rl.rollout.permutation import permute_rewards
from titan_rl.types import Completion, FinishReason, Group, Prompt, Reward, Rollout, Turn


def _group(index: int, rewards: list[float | None]) -> Group:
    prompt = Prompt(id=f"p{index}", messages=())
    completion = Completion("r", (1,), (-0.5,), FinishReason.STOP, ((0, 0),))
    rollouts = [
        Rollout(
            prompt=prompt,
            sample_index=i,
            seed=i,
            turns=[Turn((1,), completion, "")],
            reward=None if value is None else Reward(total=value),
        )
        for i, value in enumerate(rewards)
    ]
    return Group(prompt=prompt, index=index, rollouts=rollouts)


def _totals(group: Group) -> list[float | None]:
    return [None if r.reward is None else r.reward.total for r in group.rollouts]


def test_a_group_keeps_its_rewards_and_loses_their_places() -> None:
    before = [[float(10 * g + i) for i in range(8)] for g in range(4)]
    groups = [_group(g, list(values)) for g, values in enumerate(before)]

    permute_rewards(groups, run_seed=3)

    after = [_totals(group) for group in groups]
    assert [sorted(values) for values in after] == before  # type: ignore[type-var]
    assert all(new != old for new, old in zip(after, before, strict=True))


def test_a_failed_reward_stays_where_it_failed() -> None:
    group = _group(0, [1.0, None, 2.0, None, 3.0])

    permute_rewards([group], run_seed=0)

    assert [value is None for value in _totals(group)] == [False, True, False, True, False]


def test_the_order_depends_on_the_seed_and_the_index_of_the_group_alone() -> None:
    values = [float(i) for i in range(8)]
    alone, among, other_seed = _group(5, list(values)), _group(5, list(values)), _group(5, list(values))

    permute_rewards([alone], run_seed=1)
    permute_rewards([_group(4, list(values)), among], run_seed=1)
    permute_rewards([other_seed], run_seed=2)

    assert _totals(alone) == _totals(among) != _totals(other_seed)
