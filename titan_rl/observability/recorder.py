"""Rollouts as JSON lines: a file per iteration and rank, so that an iteration done again replaces its own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_rl.types import Group

_FILE = re.compile(r"(?P<kind>[a-z_]+)-(?P<number>\d{6,})\.rank-\d+\.jsonl")


class RolloutRecorder:
    """Writes ``<directory>/train-000007.rank-0.jsonl`` and ``evaluation-000010.rank-0.jsonl``."""

    def __init__(self, directory: Path, rank: int) -> None:
        """Bind the directory.

        Args:
            directory: Made if missing.
            rank: Global rank; part of the file name.
        """
        self._directory, self._rank = directory, rank
        directory.mkdir(parents=True, exist_ok=True)

    def record(
        self,
        kind: str,
        number: int,
        groups: Sequence[Group],
        advantages: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        """Write this rank's groups; the file appears whole or not at all.

        Args:
            kind: ``train`` (numbered by iteration) or ``evaluation`` (numbered by step).
            number: Iteration or step.
            groups: Scored groups.
            advantages: By group index and sample index; a rollout without one was not trained on.
        """
        advantages = advantages or {}
        lines = []
        for group in groups:
            for rollout in group.rollouts:
                turn = rollout.turns[-1]
                reward = rollout.reward
                record = {
                    "prompt_id": group.prompt.id,
                    "prompt_index": group.index,
                    "sample_index": rollout.sample_index,
                    "seed": rollout.seed,
                    "messages": [{"role": m.role, "content": m.content} for m in group.prompt.messages],
                    "answer": group.prompt.answer,
                    "completion": turn.text,
                    "finish_reason": turn.completion.finish_reason.value,
                    "policy_version": turn.completion.policy_versions[0][1],
                    "num_prompt_tokens": len(turn.prompt_token_ids),
                    "completion_token_ids": list(turn.completion.token_ids),
                    "generator_logprobs": [round(x, 6) for x in turn.completion.logprobs],
                    "reward": None if reward is None else reward.total,
                    "reward_parts": None if reward is None else dict(reward.parts),
                    "reward_error": rollout.reward_error,
                    "advantage": advantages.get((group.index, rollout.sample_index)),
                }
                lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        path = self._directory / f"{kind}-{number:06d}.rank-{self._rank}.jsonl"
        partial = path.with_suffix(".partial")
        partial.write_text("".join(lines), encoding="utf-8")
        os.replace(partial, path)

    def drop_after(self, kind: str, number: int) -> int:
        """Delete files of a kind with a higher number: iterations that a resumed run executes again.

        Args:
            kind: ``train`` or ``evaluation``.
            number: Last number to keep.

        Returns:
            How many files were deleted. Only rank 0 should call it.
        """
        dropped = 0
        for path in self._directory.iterdir():
            match = _FILE.fullmatch(path.name)
            if match and match["kind"] == kind and int(match["number"]) > number:
                path.unlink()
                dropped += 1
        return dropped
