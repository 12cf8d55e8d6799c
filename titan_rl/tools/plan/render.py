"""A plan as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from titan_rl.errors import ConfigError
from titan_rl.tools.plan.memory import RESIDENT, RankMemory
from titan_rl.tools.plan.plan import Plan, gib

_TRANSIENT = (
    "gathered weights",
    "activations",
    "recomputed layer",
    "scoring activations",
    "logits",
    "generator weights",
    "KV cache",
    "generator activations",
    "weights in transit",
)


def render(plan: Plan, *, located: Callable[[ConfigError], ConfigError] = lambda error: error) -> str:
    """The whole plan, section by section, contradictions last.

    Args:
        plan: To print.
        located: Adds the file and line of a key to an error.
    """
    lines = [*_run(plan), *_batch(plan), *_memory(plan), *_traffic(plan), *_contradictions(plan, located)]
    return "\n".join(lines)


def _run(plan: Plan) -> Iterator[str]:
    degrees, facts = plan.facts.degrees, plan.facts
    axes = {
        "pipeline": degrees.pipeline,
        "replicate": degrees.replicate,
        "shard": degrees.shard,
        "context": degrees.context,
        "tensor": degrees.tensor,
    }
    mesh = " x ".join(f"{name} {size}" for name, size in axes.items())
    experts = f"; experts over {degrees.expert} of them" if degrees.expert > 1 else ""
    yield f"mesh: {mesh} = {degrees.world_size} rank(s) on {facts.device_type}{experts}"
    if not plan.numel:
        return
    yield f"policy: {plan.numel / 1e9:.3f} billion parameters"
    if degrees.pipeline > 1:
        schedule = facts.parallelism.pipeline_parallel_schedule
        yield f"pipeline: {schedule}, {100 * plan.bubble:.1f} % of a step is waiting if stages are equal"


def _batch(plan: Plan) -> Iterator[str]:
    b, facts = plan.batch, plan.facts
    if b is None:
        return
    yield ""
    yield "batch ('at most': all samples of full length)"
    yield f"  iterations         {b.iterations:,} of {b.steps_per_iteration} step(s)"
    yield f"  optimiser steps    {b.steps:,}, each taken by all {facts.world_size:,} rank(s)"
    yield f"  prompts            {b.prompts:,} per iteration = {b.prompts:,} groups of {facts.group_size}"
    idle = f"; {b.idle_generators:,} have none" if b.idle_generators else ""
    yield (
        f"  generators         {b.generators:,} of {facts.generator.degree} rank(s), at most "
        f"{b.prompts_per_generator:,} prompt(s) each{idle}"
    )
    yield f"  samples            {b.samples:,} per iteration, {b.samples_per_step:,} per step"
    if b.baselines:
        yield f"  greedy baselines   {b.baselines:,} per iteration, not trained on"
    yield f"  data ranks         {b.data_ranks:,}, at most {b.samples_per_rank:,} samples each in a step"
    yield (
        f"  rows               at most {b.rows_per_rank:,} of {b.tokens_per_row:,} tokens per data rank and "
        f"step, {b.rows:,} in all"
    )
    yield (
        f"  micro-batches      at most {b.micro_batches_per_rank:,} of {facts.rows} row(s) per data rank and "
        f"step, {b.micro_batches:,} in all"
    )
    yield f"  tokens             at most {b.tokens_per_step:,} per step"


def _memory(plan: Plan) -> Iterator[str]:
    memory, generator = plan.memory, plan.generator
    if memory is None or generator is None:
        return
    yield ""
    place = f", pipeline rank {memory.pipeline_rank}" if plan.facts.degrees.pipeline > 1 else ""
    yield f"memory of the rank that needs most{place}, GiB"
    for name in (*RESIDENT, *_TRANSIENT):
        if memory.items.get(name):
            yield f"  {name:<24} {gib(memory.items[name]):>9}{'' if name in RESIDENT else '  at times'}"
    yield from _phases(plan, memory)
    yield (
        f"KV cache: {generator.bytes_per_token:,} bytes per token, room for {generator.tokens:,} tokens = "
        f"{generator.sequences:,} sequences of {plan.facts.sample_tokens:,}"
    )


def _phases(plan: Plan, memory: RankMemory) -> Iterator[str]:
    yield "phases, GiB" + (f" of {gib(plan.device_bytes)}" if plan.device_bytes else "")
    for phase in memory.phases:
        total = memory.total(phase)
        mark = "  peak" if phase == memory.peak_phase else ""
        if plan.device_bytes and total > plan.device_bytes:
            mark += f"  does not fit: {gib(total - plan.device_bytes)} too much"
        yield f"  {phase:<24} {gib(total):>9}{mark}"


def _traffic(plan: Plan) -> Iterator[str]:
    traffic, work, batch = plan.traffic, plan.work, plan.batch
    if traffic is None or work is None or batch is None:
        return
    yield ""
    yield "each rank sends, GiB"
    for axis, size in traffic.per_step.items():
        yield f"  per step, {axis:<14} {gib(size):>9}"
    yield f"  per weight sync          {gib(traffic.per_sync):>9}"
    yield ""
    yield f"floating-point operations, 10^12{'all ranks':>22}{'each rank':>12}"
    rows = {
        "per step, training": work.training,
        "per step, recomputation": work.recomputation,
        "per step, scoring": work.scoring,
        "per iteration, generation": work.generation,
    }
    for name, number in rows.items():
        if number:
            each = number / plan.facts.world_size
            yield f"  {name:<32} {number / 1e12:>18,.1f} {each / 1e12:>11,.1f}"


def _contradictions(plan: Plan, located: Callable[[ConfigError], ConfigError]) -> Iterator[str]:
    yield ""
    if not plan.contradictions:
        yield "no contradictions"
        return
    yield f"{len(plan.contradictions)} contradiction(s)"
    for number, error in enumerate(plan.contradictions, start=1):
        yield f"  {number}. {located(error)}"
