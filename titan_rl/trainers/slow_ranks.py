"""What trainers report about ranks that are slower than the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan_rl.observability.stragglers import straggler_metrics, straggler_warnings
from titan_rl.titan.api import logger
from titan_rl.titan.collectives import Collectives


def stragglers(
    own_seconds: Mapping[str, float], stages: Sequence[str], *, collectives: Collectives
) -> dict[str, float]:
    """Metrics about the slowest rank of each stage, which rank 0 also names in its log. Collective.

    Args:
        own_seconds: This rank's by stage, without what it waited for others.
        stages: Those to compare.
        collectives: Of the run.
    """
    by_rank = collectives.gather({stage: own_seconds.get(stage, 0.0) for stage in stages})
    if collectives.rank == 0:
        for line in straggler_warnings(by_rank):
            logger.warning(line)
    return straggler_metrics(by_rank)
