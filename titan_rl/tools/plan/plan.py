"""A plan: everything that a run would need, as one object that is printed or written as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from titan_rl.errors import ConfigError
from titan_rl.policy.teacher import teacher_spec
from titan_rl.titan.architecture import architecture_of
from titan_rl.titan.meta_model import shard_on_meta
from titan_rl.tools.plan.arithmetic import batch_plan
from titan_rl.tools.plan.communication import Traffic, traffic, transit_bytes
from titan_rl.tools.plan.fit import check_cache, check_memory
from titan_rl.tools.plan.flops import Work, work
from titan_rl.tools.plan.generation import GeneratorMemory, generator_memory
from titan_rl.tools.plan.memory import Models, RankMemory, rank_memory
from titan_rl.tools.plan.pipeline import bubble_fraction, schedule_micro_batches
from titan_rl.tools.plan.run_facts import GIB, RunFacts, read_run
from titan_rl.trainers.batch_arithmetic import BatchPlan
from titan_rl.trainers.checks import find_contradictions
from titan_rl.trainers.layout import num_stages
from titan_rl.trainers.layout_checks import contradictions


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run would need.

    Attributes:
        facts: The run.
        device_bytes: Memory of a device; 0 if not known.
        contradictions: Why it would not start, or not fit; empty for a run that can be submitted.
        batch: Counts. This and what follows is None for a layout that cannot exist.
        memory: Of the rank that needs most.
        generator: Its memory.
        traffic: Bytes that a rank sends.
        work: Floating-point operations.
        numel: Parameters of the policy.
        bubble: Share of a training step in which a pipeline's rank waits.
    """

    facts: RunFacts
    device_bytes: int
    contradictions: list[ConfigError] = field(default_factory=list)
    batch: BatchPlan | None = None
    memory: RankMemory | None = None
    generator: GeneratorMemory | None = None
    traffic: Traffic | None = None
    work: Work | None = None
    numel: int = 0
    bubble: float = 0.0

    @property
    def sync_peak_bytes(self) -> int:
        """What a rank holds at the peak of a weight sync."""
        return 0 if self.memory is None else self.memory.total("weight sync")


def make_plan(config: Any, *, world_size: int, device_type: str, device_bytes: int) -> Plan:
    """Plan an RL run on one CPU; nothing is allocated or started.

    Args:
        config: An RL trainer's configuration, made for ``device_type``; it stays as it is.
        world_size: Ranks that torchrun would start.
        device_type: ``cuda`` or ``cpu``, of the run.
        device_bytes: Memory of a device; 0 if not known: nothing is then said to be too large.
    """
    facts = read_run(config, world_size=world_size, device_type=device_type)
    of_layout = contradictions(
        config.parallelism,
        architecture=facts.architecture,
        world_size=world_size,
        seq_len=facts.seq_len,
        local_batch_size=facts.rows,
        generator_degree=facts.generator.degree,
        has_cuda_graphs=not config.training.disable_cuda_graphs,
    )
    found = [*of_layout, *find_contradictions(config, device_type=device_type)]
    if of_layout:
        return Plan(facts=facts, device_bytes=device_bytes, contradictions=found)
    try:
        models = _models(config, world_size)
    except ConfigError as error:
        return Plan(facts=facts, device_bytes=device_bytes, contradictions=[*found, error])
    policy = models.policy
    generator = generator_memory(facts, numel=policy.numel, device_bytes=device_bytes)
    memory = rank_memory(facts, models, generator, transit_bytes=transit_bytes(facts, policy))
    if device_bytes:
        found += check_memory(facts, memory, device_bytes=device_bytes)
    found += check_cache(facts, generator, device_bytes=device_bytes)
    batch = batch_plan(facts)
    return Plan(
        facts=facts,
        device_bytes=device_bytes,
        contradictions=found,
        batch=batch,
        memory=memory,
        generator=generator,
        traffic=traffic(facts, policy, batch),
        work=work(facts, models, batch),
        numel=policy.numel,
        bubble=_bubble(facts),
    )


def _models(config: Any, world_size: int) -> Models:
    policy = shard_on_meta(config, config.model_spec, world_size=world_size)
    teacher = architecture = None
    if config.teacher is not None:
        spec: Any = teacher_spec(config.teacher, config.model)
        teacher, architecture = (
            shard_on_meta(config, spec, world_size=world_size),
            architecture_of(spec.model),
        )
    # A reward model is a directory of any supported size; it is counted as large as the policy.
    reward_model = policy if config.reward_model is not None else None
    return Models(policy, teacher, reward_model, teacher_architecture=architecture)


def _bubble(facts: RunFacts) -> float:
    ranks = facts.degrees.pipeline
    if ranks == 1:
        return 0.0
    return bubble_fraction(
        ranks=ranks,
        micro_batches=schedule_micro_batches(facts.parallelism, facts.rows),
        stages_per_rank=num_stages(facts.parallelism, facts.architecture) // ranks,
        schedule=facts.parallelism.pipeline_parallel_schedule,
    )


def as_json(
    plan: Plan, *, located: Callable[[ConfigError], ConfigError] = lambda error: error
) -> dict[str, Any]:
    """The plan as JSON: bytes, not GiB; names as in the printed plan.

    Args:
        plan: To write.
        located: Adds the file and line of a key to an error.
    """
    degrees = plan.facts.degrees
    document: dict[str, Any] = {
        "world_size": plan.facts.world_size,
        "device": {"type": plan.facts.device_type, "bytes": plan.device_bytes},
        "mesh": dataclasses.asdict(degrees),
        "contradictions": [
            {"key": error.where, "message": str(located(error))} for error in plan.contradictions
        ],
    }
    if plan.batch is None or plan.memory is None or plan.generator is None:
        return document
    if plan.traffic is None or plan.work is None:
        return document
    memory = plan.memory
    return document | {
        "parameters": plan.numel,
        "batch": dataclasses.asdict(plan.batch),
        "memory": {
            "pipeline_rank": memory.pipeline_rank,
            "items": memory.items,
            "phases": {phase: memory.total(phase) for phase in memory.phases},
            "peak_phase": memory.peak_phase,
        },
        "generator": dataclasses.asdict(plan.generator),
        "traffic": {"per_step": plan.traffic.per_step, "per_sync": plan.traffic.per_sync},
        "weight_sync_peak": plan.sync_peak_bytes,
        "flops": dataclasses.asdict(plan.work),
        "bubble": plan.bubble,
    }


def gib(number: float) -> str:
    """Bytes in GiB, with as many digits as tell something.

    >>> gib(3 * 2**30), gib(2**20)
    ('3.00', '0.001')
    """
    value = number / GIB
    return f"{value:.2f}" if value >= 0.095 or value == 0 else f"{value:.3f}"
