"""The batch arithmetic of a planned run."""

from __future__ import annotations

from titan_rl.tools.plan.run_facts import RunFacts
from titan_rl.trainers import batch_arithmetic
from titan_rl.trainers.batch_arithmetic import BatchPlan


def batch_plan(facts: RunFacts) -> BatchPlan:
    """Follow an iteration's prompts, as :func:`titan_rl.trainers.batch_arithmetic.batch_plan`.

    Args:
        facts: The run.
    """
    return batch_arithmetic.batch_plan(
        facts.degrees,
        world_size=facts.world_size,
        generator_degree=facts.generator.degree,
        prompts=facts.prompts,
        group_size=facts.group_size,
        has_baselines=facts.needs_baseline,
        steps=facts.steps,
        steps_per_iteration=facts.steps_per_iteration,
        seq_len=facts.seq_len,
        sample_tokens=facts.sample_tokens,
        rows=facts.rows,
    )
