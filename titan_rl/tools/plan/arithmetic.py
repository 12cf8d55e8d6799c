"""How an iteration's prompts become rows and optimiser steps, on one rank and in all. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from titan_rl.tools.plan.run_facts import RunFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Counts; those "at most" are reached when every sample is of full length.

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


def batch_plan(facts: RunFacts) -> BatchPlan:
    """Follow an iteration's prompts.

    A generator group takes every n-th prompt, its ranks share the rollouts, and the steps share the groups.
    The ranks of one data-parallel rank train on what all of them kept. First fit leaves no two rows that
    would go into one, so that every row but the last holds as many samples of full length as fit.

    Args:
        facts: The run.
    """
    steps, degree = facts.steps_per_iteration, facts.generator.degree
    generators = max(facts.world_size // degree, 1)
    per_generator = _ceil(facts.prompts, generators)
    groups_per_step = _ceil(facts.prompts, steps)
    kept = _ceil(_ceil(per_generator, steps) * facts.group_size, degree)
    per_rank = min(kept * facts.degrees.model_parallel, groups_per_step * facts.group_size)
    per_row = max(facts.seq_len // facts.sample_tokens, 1)
    rows_per_rank = _ceil(per_rank, per_row)
    micro_batches = _ceil(rows_per_rank, facts.rows)
    data_ranks, samples = facts.degrees.data_parallel, facts.prompts * facts.group_size
    samples_per_step = min(groups_per_step * facts.group_size, samples)
    return BatchPlan(
        iterations=facts.steps // steps,
        steps=facts.steps,
        steps_per_iteration=steps,
        prompts=facts.prompts,
        samples=samples,
        baselines=facts.prompts if facts.needs_baseline else 0,
        samples_per_step=samples_per_step,
        generators=generators,
        prompts_per_generator=per_generator,
        idle_generators=max(generators - facts.prompts, 0),
        data_ranks=data_ranks,
        samples_per_rank=per_rank,
        rows_per_rank=rows_per_rank,
        micro_batches_per_rank=micro_batches,
        rows=min(rows_per_rank * data_ranks, samples_per_step),
        micro_batches=micro_batches * data_ranks,
        tokens_per_row=facts.seq_len,
        tokens_per_step=samples_per_step * facts.sample_tokens,
    )


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
