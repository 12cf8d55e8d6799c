"""Samples are the prompt's tokens and the completion's, of which the latter are trained."""

from tests.unit.rollout.rollout_fakes import make_group, make_rollout
from titan_rl.rollout.samples import to_samples
from titan_rl.types import Group


def test_a_sample_holds_prompt_and_completion_and_trains_the_completion():
    group = make_group(4, [0.5])
    group.rollouts = [make_rollout(prompt_tokens=(1, 2, 3), tokens=(9, 8), reward=0.5, sample_index=2)]
    (sample,) = to_samples([group])
    assert sample.token_ids == [1, 2, 3, 9, 8]
    assert sample.loss_mask == [False, False, False, True, True]
    assert sample.generator_logprobs == [0.0, 0.0, 0.0, -0.1, -0.2]
    assert (sample.reward, sample.group_index, sample.sample_index) == (0.5, 4, 2)
    assert not sample.is_truncated


def test_truncation_is_carried_over():
    group = Group(prompt=make_rollout().prompt, index=0, rollouts=[make_rollout(is_truncated=True)])
    assert to_samples([group])[0].is_truncated


def test_rollouts_without_a_reward_are_left_out_and_the_order_is_kept():
    groups = [make_group(3, [0.0, None, 1.0]), make_group(1, [None, None]), make_group(2, [2.0])]
    samples = to_samples(groups)
    assert [(s.group_index, s.sample_index, s.reward) for s in samples] == [
        (3, 0, 0.0),
        (3, 2, 1.0),
        (2, 0, 2.0),
    ]


def test_a_reward_of_zero_is_no_failure():
    assert len(to_samples([make_group(0, [0.0, 0.0])])) == 2
