"""Which rank is slow, and at what: a run is as fast as its slowest rank."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

_FLOOR_SECONDS = 0.01
_WARN_RATIO, _WARN_SECONDS = 2.0, 1.0


def straggler_metrics(own_seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """For each stage, how much longer the slowest rank took than the median one, and which it is.

    ``max / median``, both taken as 10 ms at least; of an even number of ranks the lower median, so that of
    two ranks the slower is compared with the faster.

    Args:
        own_seconds: By stage, one number a rank: without what it waited for others.

    Returns:
        ``straggler/<stage>`` and ``straggler/<stage>_rank``; nothing for a single rank.

    >>> straggler_metrics({"generate": [1.0, 3.0]})
    {'straggler/generate': 3.0, 'straggler/generate_rank': 1.0}
    """
    metrics: dict[str, float] = {}
    for stage, seconds in own_seconds.items():
        if len(seconds) < 2:
            continue
        slowest = max(seconds)
        median = max(statistics.median_low(seconds), _FLOOR_SECONDS)
        metrics[f"straggler/{stage}"] = max(slowest, _FLOOR_SECONDS) / median
        metrics[f"straggler/{stage}_rank"] = float(seconds.index(slowest))
    return metrics


def straggler_warnings(own_seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """A line for each stage in which a rank took over twice as long as the median one, and 1 s longer.

    Args:
        own_seconds: As for :func:`straggler_metrics`.

    >>> straggler_warnings({"generate": [1.0, 3.0], "train": [0.1, 0.3]})
    ['Rank 1 is slow: 3.0 s for generate; the median rank took 1.0 s.']
    """
    lines = []
    for stage, seconds in own_seconds.items():
        slowest, median = max(seconds), statistics.median_low(seconds)
        if slowest > _WARN_RATIO * median and slowest > median + _WARN_SECONDS:
            rank = list(seconds).index(slowest)
            lines.append(
                f"Rank {rank} is slow: {slowest:.1f} s for {stage}; the median rank took {median:.1f} s."
            )
    return lines
