"""Run rollouts: submit one request per completion, score each as it finishes, and put groups together.

Used alike for training (sampled, in groups) and for evaluation (held-out prompts). Single-turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_rl import heartbeat
from titan_rl.data.chat import PromptEncoder
from titan_rl.errors import GeneratorError, RewardError, StopRequestedError
from titan_rl.generation.protocol import Generator, check_completion
from titan_rl.resilience import faults
from titan_rl.resilience.seeds import derive_seed
from titan_rl.rewards.pool import RewardFailure, RewardPool
from titan_rl.rollout.exchange import Exchange, exchange_groups
from titan_rl.rollout.share import Share
from titan_rl.rollout.stats import RunStats
from titan_rl.types import Completion, GenerationRequest, Group, Prompt, Rollout, SamplingParams, Turn

if TYPE_CHECKING:
    from titan_rl.resilience.stopping import StopControl


class RolloutRunner:
    """Turns prompts into scored groups, on this rank's share of them."""

    def __init__(
        self,
        *,
        generator: Generator,
        rewards: RewardPool,
        encoder: PromptEncoder,
        share: Share,
        run_seed: int,
        timeout_seconds: float,
        exchange: Exchange | None = None,
        control: StopControl | None = None,
    ) -> None:
        """Bind the collaborators.

        Args:
            generator: Serving confirmed weights whenever :meth:`run` is called.
            rewards: Scores rollouts in worker processes.
            encoder: Renders and encodes prompts, decodes completions.
            share: This rank's part of the work.
            run_seed: First part of every seed.
            timeout_seconds: Deadline of one call's generation, and again of its rewards.
            exchange: Between the ranks that train on the same rows; None where each has rows of its own.
            control: Whether to give up; None: never.
        """
        self._generator, self._rewards, self._encoder = generator, rewards, encoder
        self._share, self._run_seed, self._timeout = share, run_seed, timeout_seconds
        self._control, self._exchange = control, exchange
        self._scoring: list[Rollout] = []  # rollouts handed to the rewards, by key

    def run(
        self,
        prompts: Sequence[tuple[int, Prompt]],
        *,
        group_size: int,
        sampling: SamplingParams,
        policy_version: int,
        purpose: str = "train",
    ) -> tuple[list[Group], RunStats]:
        """Generate and score ``group_size`` rollouts of each prompt in this rank's share. Collective.

        Args:
            prompts: All prompts of all ranks, each with its index (the global cursor).
            group_size: Rollouts per prompt.
            sampling: How to draw.
            policy_version: Version that the generator must serve.
            purpose: Part of every seed, so that evaluation does not repeat the training draws.

        Returns:
            The kept groups in the order of ``prompts``, with those of the ranks that train on the same rows,
            and counts.

        Raises:
            GeneratorError: the generator serves another version, fails, or runs past the deadline.
            StopRequestedError: some rank was asked to stop before it was done. Raised on every rank.
        """
        served = self._generator.status().policy_version
        if served != policy_version:
            raise GeneratorError(
                f"The generator must serve policy version {policy_version}; it serves {served}. "
                "Its completions would be of other weights and are refused."
            )
        stats = RunStats()
        groups = self._plan(prompts, group_size, purpose)
        started, kept = time.perf_counter(), None
        faults.at("rollout.begin")
        try:
            with heartbeat.phase("generate"):
                kept = self._generate(groups, sampling, policy_version, stats)
            stats.generation_seconds = time.perf_counter() - started
            faults.at("rollout.end")
            with heartbeat.phase("reward"):
                self._collect_rewards(kept, stats)
            stats.reward_seconds = time.perf_counter() - started - stats.generation_seconds
        except StopRequestedError:
            kept = None
        # A rank that finished before the request came gives its rollouts up with the others.
        with heartbeat.phase("collective"):
            is_stopping = (
                kept is None if self._control is None else self._control.is_stopping_anywhere(kept is None)
            )
        if kept is None or is_stopping:
            raise StopRequestedError("The rollouts were given up: the run was asked to stop.")
        return (kept, stats) if self._exchange is None else exchange_groups(kept, stats, self._exchange)

    def _plan(self, prompts: Sequence[tuple[int, Prompt]], group_size: int, purpose: str) -> list[Group]:
        """Groups of this rank's generator, each rollout with its seed and an empty first turn."""
        groups = []
        for position in self._share.to_generate(len(prompts)):
            index, prompt = prompts[position]
            token_ids = tuple(self._encoder.encode(prompt.messages))
            rollouts = []
            for sample_index in range(group_size):
                # A prompt that returns in a later epoch has another index and so draws anew.
                seed = derive_seed(self._run_seed, purpose, index, prompt.id, sample_index, 0)
                rollouts.append(Rollout(prompt=prompt, sample_index=sample_index, seed=seed, turns=[]))
            groups.append(Group(prompt=prompt, index=index, rollouts=rollouts, prompt_token_ids=token_ids))
        return groups

    def _generate(
        self, groups: list[Group], sampling: SamplingParams, policy_version: int, stats: RunStats
    ) -> list[Group]:
        """Sample everything, hand kept rollouts to the rewards as they finish, and return the kept groups."""
        kept_positions = set(self._share.to_keep_among_generated(len(groups)))
        requests: dict[str, tuple[GenerationRequest, Rollout, bool]] = {}
        for position, group in enumerate(groups):
            for rollout in group.rollouts:
                request = GenerationRequest(
                    id=f"{group.index}:{group.prompt.id}/{rollout.sample_index}/0",
                    prompt_token_ids=group.prompt_token_ids,
                    sampling=sampling,
                    seed=rollout.seed,
                )
                requests[request.id] = (request, rollout, position in kept_positions)
        self._generator.submit([request for request, _, _ in requests.values()])
        self._scoring, half = [], len(requests) // 2
        for completion in self._generator.completions(self._timeout):
            asked = requests.pop(completion.request_id, None)
            heartbeat.beat()
            if asked is None:
                raise GeneratorError(
                    f"The generator must answer each request once; got another completion of "
                    f"{completion.request_id!r}. Nothing else may be in flight."
                )
            request, rollout, is_kept = asked
            check_completion(completion, request, policy_version=policy_version)
            if is_kept:
                self._finish(rollout, request, completion, stats)
            if len(requests) == half:
                faults.at("rollout.mid")
        if requests:
            raise GeneratorError(
                f"The generator must answer every request; {len(requests)} are missing, "
                f"{next(iter(requests))!r} among them."
            )
        return [group for position, group in enumerate(groups) if position in kept_positions]

    def _finish(
        self, rollout: Rollout, request: GenerationRequest, completion: Completion, stats: RunStats
    ) -> None:
        text = self._encoder.decode(completion.token_ids)
        rollout.turns.append(
            Turn(prompt_token_ids=request.prompt_token_ids, completion=completion, text=text)
        )
        stats.num_rollouts += 1
        stats.num_tokens += len(completion.token_ids)
        stats.num_prompt_tokens += len(request.prompt_token_ids)
        stats.num_truncated += rollout.is_truncated
        self._rewards.submit(len(self._scoring), rollout)
        self._scoring.append(rollout)

    def _collect_rewards(self, groups: Sequence[Group], stats: RunStats) -> None:
        answered, expected = 0, sum(len(group.rollouts) for group in groups)
        faults.at("reward.begin")
        for key, result in self._rewards.results(self._timeout):
            if self._control is not None and self._control.should_interrupt():
                raise StopRequestedError("Rewards were given up: the run was asked to stop.")
            heartbeat.beat()
            answered += 1
            if answered == (expected + 1) // 2:
                faults.at("reward.mid")
            rollout = self._scoring[key]
            if isinstance(result, RewardFailure):
                rollout.reward_error = f"{result.reason}: {result.message}"
                stats.reward_failures[result.reason] += 1
            else:
                rollout.reward = result
        if answered != expected:
            raise RewardError(f"Rewards must answer every rollout; got {answered} of {expected}.")
