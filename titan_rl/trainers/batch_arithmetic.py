"""How an iteration's prompts become rows and optimiser steps, on one rank and in all. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from titan_rl.trainers.layout import Degrees


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Counts of a run whose samples are all of full length, which is the most work it can have.

    Attributes:
        iterations: Of the run.
        steps: Optimiser steps of the run.
        steps_per_iteration: K.
        prompts: Of an iteration; as many groups.
        samples: Of an iteration.
        baselines: Greedy rollouts of an iteration, one per prompt where the algorithm takes them; not trained
            on.
        samples_per_step: Of an optimiser step, at most.
        generators: Groups of ranks that generate, each with its own share.
        prompts_per_generator: At most.
        idle_generators: Generators without a prompt.
        data_ranks: Ranks with rows of their own.
        samples_per_rank: Of a step on a data-parallel rank, at most.
        rows_per_rank: The same.
        micro_batches_per_rank: The same; every rank makes as many.
        rows: Of a step over all ranks, at most.
        micro_batches: The same.
        tokens_per_row: ``training.seq_len``.
        tokens_per_step: Of all samples of a step, at most.
    """

    iterations: int
    steps: int
    steps_per_iteration: int
    prompts: int
    samples: int
    baselines: int
    samples_per_step: int
    generators: int
    prompts_per_generator: int
    idle_generators: int
    data_ranks: int
    samples_per_rank: int
    rows_per_rank: int
    micro_batches_per_rank: int
    rows: int
    micro_batches: int
    tokens_per_row: int
    tokens_per_step: int


def batch_plan(
    degrees: Degrees,
    *,
    world_size: int,
    generator_degree: int,
    prompts: int,
    group_size: int,
    has_baselines: bool = False,
    steps: int,
    steps_per_iteration: int,
    seq_len: int,
    sample_tokens: int,
    rows: int,
) -> BatchPlan:
    """Follow an iteration's prompts.

    A generator group takes every n-th prompt. The steps share the groups, and the samples of a step are dealt
    to the data-parallel ranks (:mod:`titan_rl.batching.balance`): samples of one length by their number. The
    ranks of one tensor-, context- or pipeline-parallel group train on the same.

    Args:
        degrees: The mesh.
        world_size: Ranks of the run.
        generator_degree: Ranks of a generator group.
        prompts: Of an iteration.
        group_size: Rollouts per prompt.
        has_baselines: Whether each prompt also gets a greedy rollout.
        steps: Optimiser steps of the run.
        steps_per_iteration: K.
        seq_len: Tokens of a row.
        sample_tokens: Longest sample.
        rows: Rows of a micro-batch, or of a run of a pipeline's schedule.
    """
    generators = max(world_size // generator_degree, 1)
    samples = prompts * group_size
    samples_per_step = min(_ceil(prompts, steps_per_iteration) * group_size, samples)
    per_rank = _ceil(samples_per_step, degrees.data_parallel)
    rows_per_rank = _ceil(per_rank, max(seq_len // sample_tokens, 1))
    micro_batches = _ceil(rows_per_rank, rows)
    return BatchPlan(
        iterations=steps // steps_per_iteration,
        steps=steps,
        steps_per_iteration=steps_per_iteration,
        prompts=prompts,
        samples=samples,
        baselines=prompts if has_baselines else 0,
        samples_per_step=samples_per_step,
        generators=generators,
        prompts_per_generator=_ceil(prompts, generators),
        idle_generators=max(generators - prompts, 0),
        data_ranks=degrees.data_parallel,
        samples_per_rank=per_rank,
        rows_per_rank=rows_per_rank,
        micro_batches_per_rank=micro_batches,
        rows=min(rows_per_rank * degrees.data_parallel, samples_per_step),
        micro_batches=micro_batches * degrees.data_parallel,
        tokens_per_row=seq_len,
        tokens_per_step=samples_per_step * sample_tokens,
    )


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
