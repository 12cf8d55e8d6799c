"""A pipeline's schedule in numbers: idle time, and micro-batches whose activations wait. Pure arithmetic."""

from __future__ import annotations

from typing import Any

from titan_rl.trainers.layout import SINGLE_STAGE_SCHEDULES


def bubble_fraction(*, ranks: int, micro_batches: int, stages_per_rank: int, schedule: str) -> float:
    """Share of a step in which a rank waits, if all stages take equally long.

    With p ranks, m micro-batches and v stages per rank::

        1F1B, GPipe               (p - 1) / (m + p - 1)
        Interleaved1F1B           (p - 1) / (v m + p - 1)
        InterleavedZeroBubble     (p - 1) / (3 v m + p - 1)

    The first two are Narayanan et al. 2021 (arXiv 2104.04473, sections 2.2.1 and 2.2.2), who give the bubble
    as a share of the ideal time; ``LoopedBFS`` (Lamy-Poirier 2022, arXiv 2211.05953) has the second as well.
    The third is Qi et al. 2023 (arXiv 2401.10241, table 2) with forward pass, gradient of the input and
    gradient of the weights taken as equally long: a third of the bubble.

    Args:
        ranks: p.
        micro_batches: m of one run of the schedule.
        stages_per_rank: v.
        schedule: TorchTitan's name.

    >>> bubble_fraction(ranks=4, micro_batches=8, stages_per_rank=1, schedule="1F1B")
    0.2727272727272727
    """
    weight = 3 if schedule.lower() == "interleavedzerobubble" else 1
    return (ranks - 1) / (weight * stages_per_rank * micro_batches + ranks - 1)


def chunks_in_flight(
    *, rank: int, ranks: int, micro_batches: int, stages_per_rank: int, schedule: str
) -> int:
    """Most pairs of stage and micro-batch whose activations a rank holds at the same time.

    1F1B: rank i starts ``p - i`` micro-batches before its first backward pass (Narayanan et al. 2021, section
    2.2.1). Interleaved: ``(v - 1) r + 2 (p - 1 - i) + 1`` with r micro-batches of a round
    (``torch.distributed.pipelining.schedules._get_warmup_ops``, factor 2; 1 for the zero bubble), never more
    than all ``v m``, which GPipe and LoopedBFS hold.

    Args:
        rank: i, from 0.
        ranks: p.
        micro_batches: m.
        stages_per_rank: v.
        schedule: TorchTitan's name.

    >>> pipeline = {"ranks": 4, "micro_batches": 8, "stages_per_rank": 1, "schedule": "1F1B"}
    >>> [chunks_in_flight(rank=i, **pipeline) for i in (0, 3)]
    [4, 1]
    """
    name, everything = schedule.lower(), stages_per_rank * micro_batches
    if name == "1f1b":
        return min(micro_batches, ranks - rank)
    if name in SINGLE_STAGE_SCHEDULES or name == "loopedbfs":
        return everything
    per_round = micro_batches // max(micro_batches // ranks, 1)
    factor = 1 if name == "interleavedzerobubble" else 2
    return min(everything, (stages_per_rank - 1) * per_round + factor * (ranks - 1 - rank) + 1)


def schedule_micro_batches(parallelism: Any, rows: int) -> int:
    """Micro-batches that one run of the schedule takes: a number that never changes in a run.

    Args:
        parallelism: TorchTitan's section.
        rows: ``training.local_batch_size``.
    """
    return rows // parallelism.pipeline_parallel_microbatch_size
