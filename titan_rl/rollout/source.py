"""Where an iteration's groups come from: prompts drawn, rollouts, baselines, and refill until it is full."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from titan_rl.data.cursor import PromptStream
from titan_rl.errors import TitanRLError
from titan_rl.resilience import faults
from titan_rl.rollout.runner import RolloutRunner
from titan_rl.rollout.stats import RunStats
from titan_rl.types import Group, Prompt, SamplingParams


@dataclass(slots=True)
class Taken:
    """What one iteration got, on this rank.

    Attributes:
        groups: To be trained on.
        dropped: Generated and scored, but not to be trained on: replaced by others because they teach
            nothing, or with too few rewards for an advantage.
        stats: Counts over both, and over the baselines.
        num_drawn: Prompts drawn over all ranks: by so much the cursor moves.
        num_rounds: Rounds of generation.
    """

    groups: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    stats: RunStats = field(default_factory=RunStats)
    num_drawn: int = 0
    num_rounds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How an iteration is filled.

    Attributes:
        num_groups: Groups wanted over all ranks.
        group_size: Rollouts per group.
        sampling: How to draw.
        needs_baseline: Whether each prompt also gets one greedy rollout.
        max_refills: Further rounds to replace what ``keep`` refuses; 0 takes every group.
    """

    num_groups: int
    group_size: int
    sampling: SamplingParams
    needs_baseline: bool = False
    max_refills: int = 0


class GroupSource:
    """Draws prompts in their order and has them rolled out."""

    def __init__(
        self,
        runner: RolloutRunner,
        prompts: PromptStream,
        options: SourceOptions,
        *,
        keep: Callable[[Group], bool],
        sum_over_ranks: Callable[[float], float],
        score: Callable[[list[Group]], None] | None = None,
    ) -> None:
        """Bind the collaborators.

        Args:
            runner: Generates and scores this rank's share.
            prompts: The training prompts.
            options: How an iteration is filled.
            keep: Whether a scored group is worth training on; asked only where groups are replaced.
            sum_over_ranks: Collective sum, so that all ranks see how many groups are missing.
            score: Adds what a model has to say to the rewards of this rank's groups. Collective.
        """
        self._runner, self._prompts, self._options = runner, prompts, options
        self._keep, self._sum, self._score = keep, sum_over_ranks, score

    def take(self, cursor: int, policy_version: int) -> Taken:
        """Roll out the next prompts until the iteration is full. Collective.

        A round draws exactly as many prompts as groups are missing, so which prompts are drawn does not
        depend on the number of ranks, and no group is left over.

        Args:
            cursor: Prompts drawn before.
            policy_version: Version that the generator must serve.

        Raises:
            TitanRLError: groups are missing after the last round.
        """
        options, taken = self._options, Taken()
        missing = options.num_groups
        while True:
            faults.at("data.next")
            first = cursor + taken.num_drawn
            drawn = list(enumerate(self._prompts.take(first, missing), start=first))
            groups = self._roll_out(drawn, policy_version, taken.stats)
            taken.num_drawn += missing
            taken.num_rounds += 1
            if not options.max_refills:
                taken.groups = groups
                return taken
            for group in groups:
                (taken.groups if self._keep(group) else taken.dropped).append(group)
            missing = options.num_groups - int(self._sum(len(taken.groups)))
            if not missing:
                return taken
            if taken.num_rounds > options.max_refills:
                raise TitanRLError(
                    f"{missing} of {options.num_groups} groups are missing after refill.max_rounds = "
                    f"{options.max_refills} further rounds and {taken.num_drawn} prompts: too few groups "
                    "have rewards that differ. Raise it, or choose prompts that are neither solved nor "
                    "hopeless."
                )

    def _roll_out(self, drawn: list[tuple[int, Prompt]], policy_version: int, stats: RunStats) -> list[Group]:
        options = self._options
        groups, some = self._runner.run(
            drawn, group_size=options.group_size, sampling=options.sampling, policy_version=policy_version
        )
        stats.add(some)
        if options.needs_baseline:
            greedy, some = self._runner.run(
                drawn,
                group_size=1,
                sampling=dataclasses.replace(options.sampling, temperature=0.0),
                policy_version=policy_version,
                purpose="baseline",
            )
            stats.add(some)
            for group, baseline in zip(groups, greedy, strict=True):
                group.baseline = baseline.rollouts[0]
        if self._score is not None:
            self._score(groups)
        return groups
