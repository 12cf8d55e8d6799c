"""Held-out scores: sums over groups, and pass@k by its definition."""

from itertools import combinations

import pytest

from tests.unit.rollout.rollout_fakes import make_group, make_rollout
from titan_rl.rollout.evaluation import pass_at_k, total_up


@pytest.mark.parametrize("num_samples", [1, 3, 6])
def test_pass_at_k_is_the_share_of_draws_with_a_pass(num_samples):
    for num_passed in range(num_samples + 1):
        outcomes = [True] * num_passed + [False] * (num_samples - num_passed)
        for k in range(1, num_samples + 1):
            draws = list(combinations(outcomes, k))
            expected = sum(any(drawn) for drawn in draws) / len(draws)
            assert pass_at_k(num_samples, num_passed, k) == pytest.approx(expected)


def test_totals_by_hand():
    groups = [make_group(0, [1.0, 0.0, 1.0]), make_group(1, [0.2, 0.0, 0.9]), make_group(2, [1.5, None, 0.0])]
    groups[0].rollouts[0] = make_rollout(tokens=(1, 2, 3, 4, 5))
    totals = total_up(groups, pass_threshold=1.0)
    assert (totals.num_prompts, totals.num_scored, totals.num_failed) == (3, 8, 1)
    assert totals.num_passed == 3
    assert totals.reward == pytest.approx(1 + 0 + 1 + 0.2 + 0 + 0.9 + 1.5 + 0)
    assert totals.pass_at_k == 2
    assert totals.num_tokens == 5 + 7 * 2  # of the scored ones


def test_prompts_whose_rewards_all_failed_count_for_nothing_but_the_failures():
    totals = total_up([make_group(0, [None, None]), make_group(1, [0.0])], pass_threshold=1.0)
    assert (totals.num_prompts, totals.num_scored, totals.num_failed, totals.num_tokens) == (1, 1, 2, 2)
    assert totals.pass_at_k == 0


def test_the_threshold_itself_passes():
    assert total_up([make_group(0, [0.5])], pass_threshold=0.5).num_passed == 1
    assert total_up([make_group(0, [0.5])], pass_threshold=0.51).num_passed == 0


def test_totals_of_ranks_add_up():
    groups = [make_group(0, [1.0, None]), make_group(1, [0.0, 1.0]), make_group(2, [0.3, 0.3])]
    whole = total_up(groups, pass_threshold=1.0)
    parts = [total_up(part, pass_threshold=1.0) for part in (groups[:1], groups[1:], [])]
    for name in whole.__slots__:
        assert getattr(whole, name) == pytest.approx(sum(getattr(part, name) for part in parts))
