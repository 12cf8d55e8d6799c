"""Filling an iteration: which prompts are drawn, what is replaced, baselines, and the budget."""

from collections.abc import Callable
from threading import Barrier, Thread

import pytest

from tests.unit.rollout.rollout_fakes import FakeEncoder, FakeGenerator, FakeRewards, make_prompts
from titan_rl.algorithms.refill import has_signal
from titan_rl.errors import TitanRLError
from titan_rl.rewards.wire import RewardFailure
from titan_rl.rollout.runner import RolloutRunner
from titan_rl.rollout.share import Share
from titan_rl.rollout.source import GroupSource, SourceOptions, Taken
from titan_rl.types import Prompt, Reward, Rollout, SamplingParams


class Prompts:
    """An endless stream that remembers what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def take(self, cursor: int, count: int) -> list[Prompt]:
        self.asked.append((cursor, count))
        return [prompt for _, prompt in make_prompts(count, start=cursor)]


class Rewards(FakeRewards):
    """Groups of dull prompts have equal rewards; others differ by their sample."""

    def __init__(self, is_dull: Callable[[int], bool], fails: Callable[[Rollout], bool]) -> None:
        super().__init__(fails=fails)
        self.is_dull = is_dull

    def results(self, timeout_seconds: float):
        for key, rollout in self.submitted.items():
            index = int(rollout.prompt.id[1:])
            if self.fails(rollout):
                yield key, RewardFailure("timeout", "took too long")
            else:
                yield key, Reward(0.5 if self.is_dull(index) else float(rollout.sample_index))
        self.submitted.clear()


class Ranks:
    """Sums over threads that stand for ranks."""

    def __init__(self, size: int) -> None:
        self.values, self.barrier = [0.0] * size, Barrier(size, timeout=30)

    def summing(self, rank: int) -> Callable[[float], float]:
        def add(value: float) -> float:
            self.values[rank] = value
            self.barrier.wait()
            total = sum(self.values)
            self.barrier.wait()
            return total

        return add


def never(_: object) -> bool:
    return False


def make_source(*, rank=0, world=1, sums=lambda value: value, is_dull=never, fails=never, **options):
    generator, prompts = FakeGenerator(), Prompts()
    submit = generator.submit
    # One call's requests only: the fake answers everything that it was ever asked.
    asked = []

    def submit_afresh(requests):
        generator.requests = []
        asked.append(list(requests))
        return submit(requests)

    generator.submit = submit_afresh
    runner = RolloutRunner(
        generator=generator,
        rewards=Rewards(is_dull, fails),
        encoder=FakeEncoder(),
        share=Share.of_rank(rank, world, 1),
        run_seed=7,
        timeout_seconds=5.0,
    )
    defaults = {"num_groups": 4, "group_size": 3, "sampling": SamplingParams(max_tokens=4)}
    source = GroupSource(
        runner, prompts, SourceOptions(**(defaults | options)), keep=has_signal, sum_over_ranks=sums
    )
    return source, prompts, asked


def on_ranks(world: int, *, cursor=0, **options) -> list[Taken | Exception]:
    """What each rank takes; ranks are threads that meet in the sum."""
    ranks, found = Ranks(world), [None] * world
    sources = [make_source(rank=r, world=world, sums=ranks.summing(r), **options)[0] for r in range(world)]

    def work(rank: int) -> None:
        try:
            found[rank] = sources[rank].take(cursor, 3)
        except TitanRLError as error:
            found[rank] = error

    threads = [Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def indices(groups):
    return [group.index for group in groups]


def completions(groups):
    return {(g.index, r.sample_index): r.turns[-1].completion.token_ids for g in groups for r in g.rollouts}


def test_without_refill_every_group_is_taken_whatever_its_rewards():
    source, prompts, _ = make_source(is_dull=lambda index: True)
    taken = source.take(10, 3)
    assert indices(taken.groups) == [10, 11, 12, 13]
    assert (taken.dropped, taken.num_drawn, taken.num_rounds) == ([], 4, 1)
    assert prompts.asked == [(10, 4)]
    assert taken.stats.num_rollouts == 12


def test_a_round_draws_exactly_as_many_prompts_as_groups_are_missing_in_their_order():
    source, prompts, _ = make_source(is_dull=lambda index: index in (1, 2, 5), max_refills=5)
    taken = source.take(0, 3)
    assert prompts.asked == [(0, 4), (4, 2), (6, 1)]
    assert indices(taken.groups) == [0, 3, 4, 6]
    assert indices(taken.dropped) == [1, 2, 5]
    assert (taken.num_drawn, taken.num_rounds) == (7, 3)


def test_what_is_dropped_is_counted_with_the_rest():
    source, _, asked = make_source(is_dull=lambda index: index in (1, 2, 5), max_refills=5)
    taken = source.take(0, 3)
    assert taken.stats.num_rollouts == 7 * 3 == sum(map(len, asked))
    everything = [*taken.groups, *taken.dropped]
    assert taken.stats.num_tokens == sum(len(tokens) for tokens in completions(everything).values())
    assert taken.stats.generation_seconds > 0


def test_the_next_iteration_starts_behind_everything_that_was_drawn():
    source, _, _ = make_source(is_dull=lambda index: index in (1, 2, 5), max_refills=5)
    first = source.take(0, 3)
    second = source.take(first.num_drawn, 3)
    drawn = [*first.groups, *first.dropped, *second.groups, *second.dropped]
    assert sorted(indices(drawn)) == list(range(11))


def test_a_full_first_round_asks_for_no_other():
    source, prompts, _ = make_source(max_refills=5)
    taken = source.take(0, 3)
    assert (taken.num_rounds, prompts.asked) == (1, [(0, 4)])


def test_a_run_out_budget_is_an_error_that_names_it():
    source, prompts, _ = make_source(is_dull=lambda index: index != 2, max_refills=2)
    with pytest.raises(TitanRLError) as caught:
        source.take(0, 3)
    assert "3 of 4 groups are missing after refill.max_rounds = 2 further rounds and 10 prompts" in str(
        caught.value
    )
    assert prompts.asked == [(0, 4), (4, 3), (7, 3)]  # the first round and two further ones


def test_the_last_round_of_the_budget_still_counts():
    source, _, _ = make_source(is_dull=lambda index: index in (1, 4), max_refills=2)
    taken = source.take(0, 3)
    assert (indices(taken.groups), taken.num_rounds) == ([0, 2, 3, 5], 3)


def test_groups_whose_rewards_failed_are_replaced():
    source, _, _ = make_source(fails=lambda rollout: rollout.prompt.id == "p1", max_refills=1)
    taken = source.take(0, 3)
    assert (indices(taken.groups), indices(taken.dropped)) == ([0, 2, 3, 4], [1])
    assert taken.stats.reward_failures == {"timeout": 3}


@pytest.mark.parametrize("world", [2, 3])
def test_the_same_prompts_are_drawn_kept_and_rolled_out_alike_on_any_number_of_ranks(world):
    options = {"num_groups": 7, "is_dull": lambda index: index in (0, 3, 4, 8, 9), "max_refills": 5}
    (alone,) = on_ranks(1, cursor=0, **options)
    parts = on_ranks(world, cursor=0, **options)
    kept = [group for part in parts for group in part.groups]
    assert sorted(indices(kept)) == indices(alone.groups) == [1, 2, 5, 6, 7, 10, 11]
    assert sorted(index for part in parts for index in indices(part.dropped)) == indices(alone.dropped)
    assert completions(kept) == completions(alone.groups)
    assert {(part.num_drawn, part.num_rounds) for part in parts} == {(alone.num_drawn, alone.num_rounds)}
    assert all(indices(part.groups) == sorted(indices(part.groups)) for part in parts)
    assert sum(part.stats.num_rollouts for part in parts) == alone.stats.num_rollouts


def test_a_run_out_budget_stops_all_ranks_alike():
    errors = on_ranks(2, is_dull=lambda index: index != 0, max_refills=1)
    assert [type(error) for error in errors] == [TitanRLError] * 2
    assert str(errors[0]) == str(errors[1])


def test_each_prompt_gets_one_greedy_rollout_of_its_own_as_baseline():
    source, _, asked = make_source(needs_baseline=True)
    taken = source.take(0, 3)
    sampled, greedy = asked
    assert [request.sampling.temperature for request in sampled] == [1.0] * 12
    assert [request.sampling.temperature for request in greedy] == [0.0] * 4
    assert not {request.seed for request in greedy} & {request.seed for request in sampled}
    for group in taken.groups:
        assert group.baseline.prompt is group.prompt
        assert group.baseline not in group.rollouts
        assert group.baseline.reward is not None
        assert group.baseline.turns[-1].prompt_token_ids == group.prompt_token_ids
        assert len(group.rollouts) == 3
    assert taken.stats.num_rollouts == 12 + 4


def test_without_the_need_there_is_no_baseline():
    source, _, asked = make_source()
    assert [group.baseline for group in source.take(0, 3).groups] == [None] * 4
    assert len(asked) == 1


def test_baselines_are_drawn_in_every_round_and_a_group_without_its_baseline_s_reward_is_replaced():
    is_greedy_of_first = {"p0"}

    def fails(rollout: Rollout) -> bool:
        # The greedy rollout of a prompt comes after its sampled ones.
        seen[rollout.prompt.id] = seen.get(rollout.prompt.id, 0) + 1
        return rollout.prompt.id in is_greedy_of_first and seen[rollout.prompt.id] > 3

    seen: dict[str, int] = {}
    source, _, asked = make_source(needs_baseline=True, fails=fails, max_refills=1)
    taken = source.take(0, 3)
    assert (indices(taken.groups), indices(taken.dropped)) == ([1, 2, 3, 4], [0])
    assert taken.dropped[0].baseline.reward is None
    assert all(group.baseline.reward is not None for group in taken.groups)
    assert list(map(len, asked)) == [12, 4, 3, 1]
    assert taken.stats.reward_failures == {"timeout": 1}
