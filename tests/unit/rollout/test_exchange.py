"""What the ranks that train on the same rows give one another comes back as it was, once, in one order."""

from collections import Counter
from dataclasses import replace

from tests.unit.rollout.rollout_fakes import (
    SAMPLING,
    FakeEncoder,
    FakeGenerator,
    FakeRewards,
    make_group,
    make_prompts,
    make_rollout,
)
from titan_rl.rollout.exchange import exchange_groups
from titan_rl.rollout.runner import RolloutRunner
from titan_rl.rollout.share import Share
from titan_rl.rollout.stats import RunStats
from titan_rl.types import Reward


def exchanged(*ranks):
    """What every rank gets; each gives its groups and counts."""
    sent = []
    for groups, stats in ranks:
        exchange_groups(groups, stats, lambda content: sent.append(content) or [content])
    assert all(isinstance(content, bytes) for content in sent)
    found = [exchange_groups(groups, stats, lambda content: sent) for groups, stats in ranks]
    assert all(result == found[0] for result in found)
    return found[0]


def test_groups_come_back_whole_and_by_their_index():
    first, second, third = make_group(2, [0.1, None]), make_group(5, [1.0]), make_group(3, [2.0, 1e-300])
    first.rollouts[0].reward = Reward(0.1, {"exact": 0.1, "ä": -0.0}, per_turn=(0.1,))
    first.baseline = make_rollout(prompt=first.prompt, reward=0.7, is_truncated=True)
    groups, _ = exchanged(([first, second], RunStats()), ([third], RunStats()), ([], RunStats()))
    assert groups == [first, third, second]
    completion = groups[0].rollouts[0].turns[0].completion
    assert completion.logprobs == first.rollouts[0].turns[0].completion.logprobs != ()
    assert groups[0].rollouts[1].reward_error == "timeout: took too long"


def test_counts_add_up_and_the_slowest_rank_decides_the_time():
    one = RunStats(2, 30, 4, 1, Counter(timeout=2, error=1), generation_seconds=3.0, reward_seconds=0.5)
    other = RunStats(4, 50, 8, 0, Counter(timeout=1), generation_seconds=2.0, reward_seconds=0.75)
    assert exchanged(([], one), ([], other))[1] == RunStats(
        6, 80, 12, 1, Counter(timeout=3, error=1), generation_seconds=3.0, reward_seconds=0.75
    )
    assert one == RunStats(2, 30, 4, 1, Counter(timeout=2, error=1), 3.0, 0.5)


def test_a_runner_with_an_exchange_returns_the_groups_of_both_ranks():
    """Two ranks with generators of their own that train on the same rows."""
    results, sent = [], []

    def run(rank, exchange):
        runner = RolloutRunner(
            generator=FakeGenerator(),
            rewards=FakeRewards(fails=lambda rollout: rollout.sample_index == 1),
            encoder=FakeEncoder(),
            share=Share(rank, 2),
            run_seed=7,
            timeout_seconds=5.0,
            exchange=exchange,
        )
        return runner.run(make_prompts(5), group_size=3, sampling=SAMPLING, policy_version=3)

    for rank in (0, 1):
        run(rank, lambda content: sent.append(content) or [content])
    for rank in (0, 1):
        groups, stats = run(rank, lambda content: sent)
        results.append((groups, replace(stats, generation_seconds=0.0, reward_seconds=0.0)))
    assert results[0] == results[1]
    groups, stats = results[0]
    assert [group.index for group in groups] == [0, 1, 2, 3, 4]
    assert (stats.num_rollouts, stats.reward_failures) == (15, Counter(timeout=5))
