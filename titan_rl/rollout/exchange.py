"""Rollouts between the ranks that train on the same rows.

Each rank generates and scores a share of its own. The ranks of one tensor-, context- or pipeline-parallel
group then give one another theirs, because they work on the same samples; no other rank sees them.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from titan_rl.rewards.wire import reward_from_json, reward_to_json, rollout_from_json, rollout_to_json
from titan_rl.rollout.stats import RunStats
from titan_rl.types import Group, Rollout

Exchange = Callable[[bytes], list[bytes]]
"""Gives this rank's bytes to the ranks that train on the same rows, and returns those of all. Collective."""


def exchange_groups(groups: list[Group], stats: RunStats, exchange: Exchange) -> tuple[list[Group], RunStats]:
    """Put the groups and the counts of the ranks that train on the same rows together. Collective.

    Args:
        groups: This rank's, scored.
        stats: This rank's counts.
        exchange: From bytes to those of all ranks.

    Returns:
        The groups of all ranks by their index, and the sums of their counts; seconds are the longest.
    """
    # Not asdict(), which copies a Counter as if it were a dict, and so counts its items.
    counts = {item.name: getattr(stats, item.name) for item in dataclasses.fields(stats)}
    content = {"groups": [_group_to_json(group) for group in groups], "stats": counts}
    parts = [json.loads(part) for part in exchange(json.dumps(content).encode())]
    together = [_group_from_json(group) for part in parts for group in part["groups"]]
    total = RunStats()
    for part in parts:
        counts = part["stats"]
        seconds = {name: value for name, value in counts.items() if name.endswith("_seconds")}
        longest = {name: max(value, getattr(total, name)) for name, value in seconds.items()}
        total.add(RunStats(**(counts | {"reward_failures": Counter(counts["reward_failures"])})))
        total = dataclasses.replace(total, **longest)
    return sorted(together, key=lambda group: group.index), total


def _group_to_json(group: Group) -> dict[str, Any]:
    return {
        "index": group.index,
        "prompt_token_ids": list(group.prompt_token_ids),
        "rollouts": [_rollout_to_json(rollout) for rollout in group.rollouts],
        "baseline": None if group.baseline is None else _rollout_to_json(group.baseline),
    }


def _group_from_json(value: dict[str, Any]) -> Group:
    rollouts = [_rollout_from_json(rollout) for rollout in value["rollouts"]]
    return Group(
        prompt=rollouts[0].prompt,
        index=value["index"],
        rollouts=rollouts,
        prompt_token_ids=tuple(value["prompt_token_ids"]),
        baseline=None if value["baseline"] is None else _rollout_from_json(value["baseline"]),
    )


def _rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    return rollout_to_json(rollout, with_logprobs=True) | {
        "reward": None if rollout.reward is None else reward_to_json(rollout.reward),
        "reward_error": rollout.reward_error,
    }


def _rollout_from_json(value: dict[str, Any]) -> Rollout:
    rollout = rollout_from_json(value)
    rollout.reward = None if value["reward"] is None else reward_from_json(value["reward"])
    rollout.reward_error = value["reward_error"]
    return rollout
