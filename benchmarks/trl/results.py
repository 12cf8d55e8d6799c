"""From the steps that every side wrote to figures: what must be equal, medians, ratios, tables. No torch."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OURS, PLAIN = "titan_rl", "plain loop"

Step = Mapping[str, Any]
Runs = Sequence[Sequence[Step]]
"""The steps of every run of one side, the first step of each included."""

_LENGTH_TOLERANCE = 0.15
_STAGES = ("generate", "score", "train", "sync")


def read_steps(path: Path) -> list[Step]:
    """The lines that a :class:`benchmarks.trl.clock.StepClock` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def counted(runs: Runs) -> list[Step]:
    """All steps but the first of every run.

    >>> counted([[{"a": 1}, {"a": 2}], [{"a": 3}, {"a": 4}]])
    [{'a': 2}, {'a': 4}]
    """
    return [step for run in runs for step in run[1:]]


def faults(spec: Mapping[str, Any], sides: Mapping[str, Runs]) -> list[str]:
    """What is not the same work, or did not learn. Ratios count only where there is nothing.

    Prompts and number of samples must be equal step by step, and so must completion tokens when lengths are
    equal. Natural lengths are sampled: their sums may differ by 15 %. A side learns when the mean reward of
    the second half of its steps is above that of the first half; SmolLM2 takes more steps for that.

    Args:
        spec: The workload.
        sides: Runs by side.
    """
    found = []
    prompts = [step["prompt_tokens"] for step in next(iter(sides.values()))[0]]
    sampled = {name: _mean(counted(runs), "completion_tokens") for name, runs in sides.items()}
    for name, runs in sides.items():
        for run in runs:
            if len(run) != spec["steps"]:
                found.append(f"{name}: {len(run)} steps instead of {spec['steps']}")
            if any(step["samples"] != spec["samples"] for step in run):
                found.append(f"{name}: not {spec['samples']} samples in every step")
            if [step["prompt_tokens"] for step in run] != prompts:
                found.append(f"{name}: other prompt tokens")
            wanted = spec["samples"] * spec["max_tokens"]
            if spec["lengths"] == "equal" and any(step["completion_tokens"] != wanted for step in run):
                found.append(f"{name}: not {wanted} completion tokens in every step")
        if abs(sampled[name] / sampled[OURS] - 1) > _LENGTH_TOLERANCE:
            found.append(f"{name}: {sampled[name] / sampled[OURS]:.2f} times the completion tokens of {OURS}")
        first, last = halves(runs)
        if spec["shape"] is not None and last <= first:
            found.append(f"{name}: the reward did not rise ({first:.3f}, {last:.3f})")
    return found


def halves(runs: Runs) -> tuple[float, float]:
    """Mean reward over the first and over the second half of the steps of all runs."""
    first = [step["reward"] for run in runs for step in run[: len(run) // 2]]
    last = [step["reward"] for run in runs for step in run[len(run) // 2 :]]
    return statistics.mean(first), statistics.mean(last)


def _mean(steps: Sequence[Step], key: str) -> float:
    return statistics.mean(step[key] for step in steps)


def figures(runs: Runs, *, clock: str = "seconds") -> dict[str, float]:
    """Medians over the counted steps of one side.

    Args:
        runs: Of the side.
        clock: ``seconds`` (wall) or ``cpu_seconds``.
    """
    steps = counted(runs)
    return {
        "seconds": statistics.median(step[clock] for step in steps),
        "fastest": min(step[clock] for step in steps),
        "slowest": max(step[clock] for step in steps),
        "samples_per_second": statistics.median(step["samples"] / step[clock] for step in steps),
        "tokens_per_second": statistics.median(step["completion_tokens"] / step[clock] for step in steps),
        "length": sum(step["completion_tokens"] for step in steps) / sum(step["samples"] for step in steps),
    }


def ratio(
    ours: Runs, theirs: Runs, *, clock: str = "seconds", resamples: int = 2000
) -> tuple[float, float, float]:
    """Samples per second of ours over theirs: ratio of medians, and its bootstrap interval of 95 %.

    Args:
        ours: Runs of one side.
        theirs: Runs of the other.
        clock: As for :func:`figures`.
        resamples: Of the counted steps of each side, each by itself.

    >>> runs = [[{"samples": 4, "seconds": s} for s in (9.0, 1.0, 2.0, 3.0)]]
    >>> ratio(runs, [[dict(step, seconds=2 * step["seconds"]) for step in runs[0]]])[0]
    2.0
    """
    draw = random.Random(0)
    mine, other = ([step["samples"] / step[clock] for step in counted(runs)] for runs in (ours, theirs))
    values = sorted(
        statistics.median(draw.choices(mine, k=len(mine)))
        / statistics.median(draw.choices(other, k=len(other)))
        for _ in range(resamples)
    )
    low, high = (values[math.floor(q * (resamples - 1))] for q in (0.025, 0.975))
    return statistics.median(mine) / statistics.median(other), low, high


def stages(runs: Runs) -> dict[str, float]:
    """Share of titan_rl's counted steps by stage; ``other`` is what no stage holds."""
    steps = counted(runs)
    total = sum(step["seconds"] for step in steps)
    shares = {name: sum(step["stages"].get(name, 0.0) for step in steps) / total for name in _STAGES}
    return shares | {"other": 1 - sum(shares.values())}


def table(sides: Mapping[str, Runs], *, clock: str) -> str:
    """One workload as a Markdown table: figures by side, and titan_rl against each.

    Args:
        sides: Runs by side.
        clock: As for :func:`figures`.
    """
    lines = [
        "| side | s a step (fastest to slowest) | samples/s | sampled tokens/s | mean length "
        "| reward, first and second half | titan_rl is faster by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in sides.items():
        row, (first, last) = figures(runs, clock=clock), halves(runs)
        times = "1"
        if name != OURS:
            middle, low, high = ratio(sides[OURS], runs, clock=clock)
            times = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        lines.append(
            f"| {name} | {row['seconds']:.2f} ({row['fastest']:.2f} to {row['slowest']:.2f}) "
            f"| {row['samples_per_second']:.1f} | {row['tokens_per_second']:.0f} | {row['length']:.1f} "
            f"| {first:.3f}, {last:.3f} | {times} |"
        )
    return "\n".join(lines)
