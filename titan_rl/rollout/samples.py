"""Cut trainable samples from rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from titan_rl.types import Group, Rollout, Sample


def to_samples(groups: Sequence[Group], *, mask_truncated: bool = False) -> list[Sample]:
    """One sample per scored rollout: the prompt's tokens, then the completion's, of which all are trained.

    Rollouts without a reward are left out; they were counted when their reward failed.

    Args:
        groups: Scored groups.
        mask_truncated: Train no token of a rollout that ended by a length limit.

    Returns:
        Samples in the order of the groups and of their rollouts.
    """
    return [
        _sample(rollout, group.index, is_trained=not (mask_truncated and rollout.is_truncated))
        for group in groups
        for rollout in group.rollouts
        if rollout.reward is not None
    ]


def _sample(rollout: Rollout, group_index: int, *, is_trained: bool) -> Sample:
    turn = rollout.turns[-1]
    prompt, completion = turn.prompt_token_ids, turn.completion
    reward = rollout.reward
    return Sample(
        token_ids=[*prompt, *completion.token_ids],
        loss_mask=[False] * len(prompt) + [is_trained] * len(completion.token_ids),
        generator_logprobs=[0.0] * len(prompt) + list(completion.logprobs),
        reward=reward.total if reward is not None else float("nan"),
        group_index=group_index,
        sample_index=rollout.sample_index,
        is_truncated=rollout.is_truncated,
    )
