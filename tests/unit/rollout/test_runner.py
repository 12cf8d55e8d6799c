"""Prompts in, scored groups out: seeds, shares, and what is refused."""

from dataclasses import replace

import pytest

from tests.unit.rollout.rollout_fakes import (
    SAMPLING,
    FakeEncoder,
    FakeGenerator,
    FakeRewards,
    draw,
    make_prompts,
)
from titan_rl.errors import GeneratorError, RewardError
from titan_rl.rollout.runner import RolloutRunner
from titan_rl.rollout.share import Share
from titan_rl.types import FinishReason

ALONE = Share(0, 1)
OTHER_WEIGHTS = "come from the weights of version 3 alone"


def run(*, generator=None, rewards=None, share=ALONE, seed=7, prompts=None, **changed):
    """One call; returns groups, counts and the generator."""
    generator = generator or FakeGenerator()
    runner = RolloutRunner(
        generator=generator,
        rewards=rewards or FakeRewards(),
        encoder=FakeEncoder(),
        share=share,
        run_seed=seed,
        timeout_seconds=5.0,
    )
    options = {"group_size": 3, "sampling": SAMPLING, "policy_version": 3} | changed
    groups, stats = runner.run(prompts or make_prompts(5), **options)
    return groups, stats, generator


def drawn(groups):
    """Tokens by prompt and sample, the outcome that no layout may change."""
    return {
        (group.index, rollout.sample_index): rollout.turns[-1].completion.token_ids
        for group in groups
        for rollout in group.rollouts
    }


def test_each_rollout_gets_the_completion_of_its_own_request_and_its_reward():
    groups, stats, generator = run()
    assert [group.index for group in groups] == [0, 1, 2, 3, 4]
    by_seed = {request.seed: request for request in generator.requests}
    for group in groups:
        assert [rollout.sample_index for rollout in group.rollouts] == [0, 1, 2]
        for rollout in group.rollouts:
            request, (turn,) = by_seed[rollout.seed], rollout.turns
            assert request.prompt_token_ids == turn.prompt_token_ids == group.prompt_token_ids
            assert turn.completion.token_ids == draw(request)
            assert turn.text == " ".join(map(str, turn.completion.token_ids))
            assert rollout.reward.total == len(turn.completion.token_ids)
            assert rollout.prompt is group.prompt
    lengths = [len(r.turns[-1].completion.token_ids) for g in groups for r in g.rollouts]
    assert len(set(lengths)) > 1
    assert (stats.num_rollouts, stats.num_tokens) == (15, sum(lengths))
    assert stats.num_prompt_tokens == 3 * sum(len(g.prompt_token_ids) for g in groups)
    assert stats.num_truncated == lengths.count(SAMPLING.max_tokens) > 0
    assert generator.timeouts == [5.0]


def test_every_request_has_a_seed_of_its_own():
    _, _, generator = run(prompts=make_prompts(50), group_size=8)
    seeds = [request.seed for request in generator.requests]
    assert len(set(seeds)) == len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({request.id for request in generator.requests}) == 400


def test_seeds_depend_on_run_prompt_index_sample_and_purpose():
    def seeds(**changed):
        _, _, generator = run(**changed)
        return {request.seed for request in generator.requests}

    base = seeds()
    assert seeds() == base
    assert not seeds(seed=8) & base
    assert not seeds(purpose="evaluation") & base
    later = [(index + 5, prompt) for index, prompt in make_prompts(5)]
    assert not seeds(prompts=later) & base  # the same prompts in the next epoch
    assert seeds(group_size=4) > base
    assert seeds(sampling=replace(SAMPLING, temperature=0.5)) == base


@pytest.mark.parametrize(("world_size", "degree"), [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (6, 3)])
def test_any_layout_generates_the_same_and_nothing_twice(world_size, degree):
    expected = drawn(run()[0])
    shares = [Share.of_rank(rank, world_size, degree) for rank in range(world_size)]
    results = [run(share=share) for share in shares]
    kept = [drawn(groups) for groups, _, _ in results]
    assert sum(len(part) for part in kept) == len(expected) == 15
    assert {key: tokens for part in kept for key, tokens in part.items()} == expected
    asked = [{request.id for request in generator.requests} for _, _, generator in results]
    for rank, ids in enumerate(asked):
        for other, more in enumerate(asked):
            same_group = rank // degree == other // degree
            assert (ids == more) if same_group else not ids & more
    assert sum(stats.num_rollouts for _, stats, _ in results) == 15


def test_a_rank_without_prompts_generates_nothing():
    groups, stats, generator = run(share=Share.of_rank(6, 7, 1))
    assert (groups, stats.num_rollouts, generator.requests) == ([], 0, [])


@pytest.mark.parametrize("served", [2, 4, None])
def test_a_generator_of_another_version_is_refused_before_it_samples(served):
    generator = FakeGenerator(version=served)
    with pytest.raises(GeneratorError, match=f"must serve policy version 3; it serves {served}"):
        run(generator=generator)
    assert generator.requests == []


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda c: [], "15 are missing"),
        (lambda c: [c, c], "must answer each request once; got another completion of '4:p4/2/0'"),
        (lambda c: [replace(c, request_id="other")], "got another completion of 'other'"),
        (lambda c: [replace(c, finish_reason=FinishReason.ABORT)], "be finished"),
        (lambda c: [replace(c, policy_versions=((0, 2),))], OTHER_WEIGHTS),
        (
            lambda c: [replace(c, policy_versions=((0, 3), (1, 4)))],
            "come from the weights of version 3 alone",
        ),
        (lambda c: [replace(c, logprobs=c.logprobs[:-1])], "one log-probability for each"),
        (lambda c: [replace(c, logprobs=(float("nan"),) * len(c.logprobs))], "finite log-probabilities"),
        (lambda c: [replace(c, token_ids=(), logprobs=())], "have 1 to 4 tokens"),
        (lambda c: [replace(c, token_ids=(1,) * 5, logprobs=(-1.0,) * 5)], "have 1 to 4 tokens"),
    ],
)
def test_completions_that_must_not_be_trained_on_are_refused(change, shown):
    with pytest.raises(GeneratorError, match=shown):
        run(generator=FakeGenerator(change=change))


def test_a_completion_that_is_bad_is_refused_even_where_another_rank_keeps_it():
    share = Share.of_rank(1, 2, 2)  # keeps the second and fourth prompt

    def change(completion):
        is_first = completion.request_id.startswith("0:")
        return [replace(completion, logprobs=(1.0,) * len(completion.logprobs))] if is_first else [completion]

    with pytest.raises(GeneratorError, match="at most 0"):
        run(generator=FakeGenerator(change=change), share=share)


def test_a_failed_reward_leaves_its_rollout_without_one_and_is_counted():
    rewards = FakeRewards(fails=lambda rollout: rollout.sample_index == 1)
    groups, stats, _ = run(rewards=rewards)
    for group in groups:
        assert [rollout.reward is None for rollout in group.rollouts] == [False, True, False]
        assert group.rollouts[1].reward_error == "timeout: took too long"
        assert group.rollouts[0].reward_error is None
    assert stats.reward_failures == {"timeout": 5}
    assert stats.num_rollouts == 15  # it was generated all the same


def test_a_reward_that_never_comes_is_an_error():
    rewards = FakeRewards()
    rewards.loses = 2
    with pytest.raises(RewardError, match="got 13 of 15"):
        run(rewards=rewards)


def test_a_second_call_starts_afresh():
    generator, rewards = FakeGenerator(), FakeRewards()
    runner = RolloutRunner(
        generator=generator,
        rewards=rewards,
        encoder=FakeEncoder(),
        share=ALONE,
        run_seed=7,
        timeout_seconds=5.0,
    )
    options = {"group_size": 2, "sampling": SAMPLING, "policy_version": 3}
    first, _ = runner.run(make_prompts(3), **options)
    generator.requests.clear()
    second, stats = runner.run(make_prompts(3, start=3), **options)
    assert [group.index for group in [*first, *second]] == [0, 1, 2, 3, 4, 5]
    assert stats.num_rollouts == 6
    assert all(rollout.reward for group in second for rollout in group.rollouts)
