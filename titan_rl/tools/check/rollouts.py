"""Synthetic groups: the same on every rank, of ragged length, with rewards that differ within a group."""

from __future__ import annotations

import random

from titan_rl.types import Completion, FinishReason, Group, Message, Prompt, Reward, Rollout, Turn

MAX_TOKENS = 20
"""Longest completion; it is truncated."""
LONGEST = MAX_TOKENS + 6
MAX_GROUP_SIZE = 4
_LENGTHS = (11, 1, 5, 20, 3, 8, 2, 14, 6, 4, 17, 7)


def make_groups(group_size: int, *, vocab_size: int, with_baseline: bool) -> list[Group]:
    """At least 8 rollouts in an odd number of groups, so that two ranks have unequal shares.

    Args:
        group_size: Rollouts of a group.
        vocab_size: Tokens are drawn below it.
        with_baseline: Give every group a scored greedy rollout.
    """
    source = random.Random(3)
    count = max(3, -(-8 // group_size) // 2 * 2 + 1)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(source.randrange(vocab_size) for _ in range(length))

    def rollout(group: Group, sample: int, length: int) -> Rollout:
        reason = FinishReason.LENGTH if length == MAX_TOKENS else FinishReason.STOP
        completion = Completion("", tokens(length), (0.0,) * length, reason, ((0, 0),))
        turn = Turn(group.prompt_token_ids, completion, "")
        return Rollout(group.prompt, sample, 0, [turn], Reward(source.uniform(-1.0, 2.0)))

    groups = []
    for index in range(count):
        prompt = Prompt(f"p{index}", (Message("user", "x"),))
        group = Group(prompt, index, [], tokens(source.randint(2, LONGEST - MAX_TOKENS)))
        group.rollouts = [
            rollout(group, sample, _LENGTHS[(index * group_size + sample) % len(_LENGTHS)])
            for sample in range(group_size)
        ]
        if with_baseline:
            group.baseline = rollout(group, 0, 3)
        groups.append(group)
    return groups
