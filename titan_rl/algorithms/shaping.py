"""What is done to rewards before the advantage and to advantages after it, whichever advantage it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt

from titan_rl.algorithms.interfaces import GroupRewards
from titan_rl.types import Group, Rollout


@dataclass(kw_only=True, slots=True)
class ShapingSection:
    """Table ``[shaping]``. Rewards are scaled, then bounded, then punished for length."""

    reward_scale: float = 1.0
    """Factor of the total reward."""

    reward_clip: Annotated[float, Gt(0)] = math.inf
    """Scaled rewards are bounded to plus and minus this."""

    overlong_buffer_tokens: Annotated[int, Ge(0)] = 0
    """DAPO's soft punishment: from this many tokens before ``sampling.max_tokens`` on, the reward falls in
    proportion to the length, by ``overlong_penalty`` at the limit; 0 is off."""

    overlong_penalty: Annotated[float, Ge(0)] = 1.0
    """Largest soft punishment, in units of reward."""

    mask_truncated: bool = False
    """DAPO's overlong filtering: truncated rollouts count in their group's baseline but are not trained."""

    whiten: bool = False
    """Shift and scale advantages to mean 0 and variance 1 over all trained tokens of the iteration."""

    prompt_set_weights: dict[str, float] = field(default_factory=dict)
    """Factor of the advantages by the prompt's ``prompt_set``, a column of the dataset; others have 1."""


def shape_reward(reward: float, *, num_tokens: int, section: ShapingSection, max_tokens: int) -> float:
    """The reward that the advantage sees.

    The punishment is eq. 13 of Yu et al. 2025 (DAPO, arXiv 2503.14476): 0 up to ``max_tokens - buffer``, then
    ``((max_tokens - buffer) - num_tokens) / buffer``, here times ``overlong_penalty``.

    Args:
        reward: Total reward of a rollout.
        num_tokens: Tokens sampled.
        section: What to do.
        max_tokens: ``sampling.max_tokens``.

    >>> section = ShapingSection(reward_scale=2.0, reward_clip=1.5, overlong_buffer_tokens=4)
    >>> [shape_reward(1.0, num_tokens=n, section=section, max_tokens=16) for n in (12, 13, 16)]
    [1.5, 1.25, 0.5]
    """
    shaped = min(max(reward * section.reward_scale, -section.reward_clip), section.reward_clip)
    buffer = section.overlong_buffer_tokens
    excess = max(num_tokens - (max_tokens - buffer), 0)
    return shaped - (section.overlong_penalty * excess / buffer if buffer and excess else 0.0)


def group_rewards(
    groups: Sequence[Group],
    section: ShapingSection,
    max_tokens: int,
    penalties: Mapping[tuple[int, int], float] | None = None,
) -> list[GroupRewards]:
    """Shaped rewards of the scored rollouts of each group.

    Args:
        groups: Scored groups.
        section: What to do.
        max_tokens: ``sampling.max_tokens``.
        penalties: Subtracted from a rollout's shaped reward, by group index and sample index.
    """
    penalties = penalties or {}

    def shaped(rollout: Rollout) -> float:
        total = rollout.reward.total if rollout.reward is not None else math.nan
        return shape_reward(total, num_tokens=_length(rollout), section=section, max_tokens=max_tokens)

    found = []
    for group in groups:
        scored = [rollout for rollout in group.rollouts if rollout.reward is not None]
        found.append(
            GroupRewards(
                rewards=[shaped(r) - penalties.get((group.index, r.sample_index), 0.0) for r in scored],
                num_tokens=[_length(rollout) for rollout in scored],
                baseline=None if group.baseline is None else shaped(group.baseline),
            )
        )
    return found


def set_weight(group: Group, section: ShapingSection) -> float:
    """Factor of the advantages of a group."""
    return section.prompt_set_weights.get(str(group.prompt.metadata.get("prompt_set")), 1.0)


def _length(rollout: Rollout) -> int:
    return sum(len(turn.completion.token_ids) for turn in rollout.turns)
