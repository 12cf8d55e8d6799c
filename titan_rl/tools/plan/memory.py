"""Memory of the rank that needs most, phase by phase. Pure arithmetic over sizes of shards.

What stays between steps (weights, gradients, optimiser state, reference, ...) is counted from the shards that
TorchTitan would make. What comes and goes is modelled: activations (:mod:`titan_rl.tools.plan.activations`),
gathered weights, logits, the generator, weights on their way to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from titan_rl.functional.logprobs import default_chunk_tokens
from titan_rl.titan.architecture import Architecture
from titan_rl.titan.meta_model import ShardSize, ShardSizes, unit_of
from titan_rl.tools.plan.activations import layer_bytes, outside_layers
from titan_rl.tools.plan.generation import GeneratorMemory
from titan_rl.tools.plan.pipeline import chunks_in_flight, schedule_micro_batches
from titan_rl.tools.plan.run_facts import GIB, RunFacts
from titan_rl.trainers.layout import layers_per_stage

CONTEXT_BYTES = int(1.5 * GIB)
"""Allowance for what no tensor holds on a GPU: CUDA's context, kernels, NCCL's buffers."""
RESIDENT = (
    "parameters",
    "gradients",
    "optimiser state",
    "reference",
    "critic",
    "critic gradients",
    "critic optimiser state",
    "teacher",
    "reward model",
    "buffers",
    "context",
)


@dataclass(frozen=True, slots=True)
class Models:
    """Sizes of every model of a run.

    Attributes:
        policy: The policy; the reference and the critic's layers are like it.
        teacher: Or None.
        reward_model: Or None.
        teacher_architecture: Of the teacher, where it is known; else the policy's stands in.
    """

    policy: ShardSizes
    teacher: ShardSizes | None = None
    reward_model: ShardSizes | None = None
    teacher_architecture: Architecture | None = None


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank.

    Attributes:
        pipeline_rank: Which place in the pipeline needs most; 0 without one.
        items: By name: what is there, resident or at times.
        phases: Names of the items that are there at the same time, by phase.
    """

    pipeline_rank: int
    items: dict[str, int]
    phases: dict[str, tuple[str, ...]]

    def total(self, phase: str) -> int:
        """Bytes of a phase."""
        return sum(self.items.get(name, 0) for name in self.phases[phase])

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.total)


def rank_memory(
    facts: RunFacts, models: Models, generator: GeneratorMemory, *, transit_bytes: int
) -> RankMemory:
    """Memory of the rank that needs most at its peak.

    Args:
        facts: The run.
        models: From TorchTitan's shards.
        generator: Beside the trainer.
        transit_bytes: What a weight sync holds beyond the shards and the generator's copy.
    """
    ranks = [
        _of_pipeline_rank(facts, models, generator, transit_bytes, rank)
        for rank in range(facts.degrees.pipeline)
    ]
    return max(ranks, key=lambda memory: memory.total(memory.peak_phase))


def _of_pipeline_rank(
    facts: RunFacts, models: Models, generator: GeneratorMemory, transit_bytes: int, rank: int
) -> RankMemory:
    stages = stages_of_rank(facts, rank)
    items = _resident(facts, models, stages)
    items |= {
        "activations": activation_bytes(facts, stages, rank),
        "recomputed layer": recomputed_bytes(facts, stages),
        "gathered weights": gathered_bytes(facts, models.policy, stages),
        "logits": logit_bytes(facts) if stages[-1].is_last else 0,
        "generator weights": generator.weights,
        "KV cache": generator.kv_cache,
        "generator activations": generator.activations,
        "weights in transit": transit_bytes,
    }
    items["scoring activations"] = scoring_bytes(facts, stages[0])
    awake = ("generator weights", "KV cache", "generator activations")
    asleep = () if facts.generator.sleeps else awake[:2]
    phases: dict[str, tuple[str, ...]] = {
        "generation": (*RESIDENT, *awake),
        "scoring": (*RESIDENT, *asleep, "gathered weights", "scoring activations", "logits"),
        "training": (*RESIDENT, *asleep, "gathered weights", "activations", "recomputed layer", "logits"),
        "weight sync": (*RESIDENT, *awake[:2], "weights in transit"),
    }
    return RankMemory(rank, items, phases)


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: the layers ``[first, stop)`` and what stands beside them.

    Attributes:
        first: Index of its first layer.
        stop: Index after its last layer.
        is_first: Whether it has the embedding.
        is_last: Whether it has the last norm and the output projection.
    """

    first: int
    stop: int
    is_first: bool
    is_last: bool

    def holds(self, parameter: ShardSize) -> bool:
        """Whether a parameter is this stage's."""
        unit = unit_of(parameter.name)
        if unit.startswith("layers."):
            return self.first <= int(unit.removeprefix("layers.")) < self.stop
        return self.is_first if unit == "tok_embeddings" else self.is_last


def stages_of_rank(facts: RunFacts, rank: int) -> list[Stage]:
    """The stages of one pipeline rank, in order: rank, rank + p, ...

    Args:
        facts: The run.
        rank: Place in the pipeline.
    """
    counts = layers_per_stage(facts.parallelism, facts.architecture)
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [
        Stage(starts[i], starts[i] + counts[i], i == 0, i == len(counts) - 1)
        for i in range(rank, len(counts), facts.degrees.pipeline)
    ]


def _resident(facts: RunFacts, models: Models, stages: Sequence[Stage]) -> dict[str, int]:
    numel, count = _held(models.policy.parameters, stages)
    critic, critic_count = _critic_numel(facts, models.policy, stages) if facts.needs_critic else (0, 0)
    storage, on_device = facts.storage_bytes, not facts.offloads_policy
    copies = 1 + facts.needs_reference + facts.needs_critic
    items = {
        "parameters": numel * storage * on_device,
        "gradients": numel * storage * on_device,
        "optimiser state": _moments(facts, numel, count) * on_device,
        "reference": numel * storage * (facts.needs_reference and not facts.offloads_reference),
        "critic": critic * storage * on_device,
        "critic gradients": critic * storage * on_device,
        "critic optimiser state": _moments(facts, critic, critic_count) * on_device,
        "buffers": copies * _buffers(models.policy, stages),
        "context": CONTEXT_BYTES if facts.device_type == "cuda" else 0,
    }
    for name, model, is_offloaded in (
        ("teacher", models.teacher, facts.offloads_teacher),
        ("reward model", models.reward_model, False),
    ):
        shards = 0 if model is None else sum(p.local_numel for p in model.parameters)
        items[name] = shards * storage * (not is_offloaded) // facts.degrees.pipeline
    return items


def _held(parameters: Iterable[ShardSize], stages: Sequence[Stage]) -> tuple[int, int]:
    """Numbers and tensors that a rank holds of a model."""
    held = [p.local_numel for p in parameters if any(stage.holds(p) for stage in stages)]
    return sum(held), len(held)


def _critic_numel(facts: RunFacts, policy: ShardSizes, stages: Sequence[Stage]) -> tuple[int, int]:
    """The policy with one row and a bias in place of its output projection; rank 0 holds both whole.

    A tied matrix stands under the embedding's name: the critic keeps it.
    """
    parameters = [p for p in policy.parameters if unit_of(p.name) != "lm_head"]
    numel, count = _held(parameters, stages)
    if not stages[-1].is_last:
        return numel, count
    return numel + facts.architecture.dim + 1, count + 2


def _moments(facts: RunFacts, numel: int, count: int) -> int:
    """Adam's two moments, and one step count in fp32 for each tensor (Kingma and Ba 2014, algorithm 1)."""
    return 2 * numel * facts.moment_bytes + 4 * count


def _buffers(policy: ShardSizes, stages: Sequence[Stage]) -> int:
    return sum(
        size
        for unit, size in policy.buffer_bytes.items()
        if any(stage.holds(ShardSize(f"{unit}.buffer", 0, 0)) for stage in stages)
    )


def micro_batch_tokens(facts: RunFacts) -> int:
    """Tokens of one forward-backward that this rank's layers see: a context-parallel rank sees its part."""
    rows = facts.rows
    if facts.degrees.pipeline > 1:
        rows = facts.parallelism.pipeline_parallel_microbatch_size
    return rows * facts.seq_len // facts.degrees.context


def activation_bytes(facts: RunFacts, stages: Sequence[Stage], rank: int = 0) -> int:
    """Activations that wait for their backward pass, at most.

    Args:
        facts: The run.
        stages: Of the rank.
        rank: Its place in the pipeline.
    """
    tokens, per_stage = micro_batch_tokens(facts), []
    for stage in stages:
        beside = outside_layers(facts, is_first=stage.is_first, is_last=stage.is_last)
        layers = [layer_bytes(facts, i) for i in range(stage.first, stage.stop)]
        once = sum(layer.per_layer for layer in layers) if facts.recomputation == "none" else 0
        per_stage.append(tokens * (beside + sum(layer.kept for layer in layers)) + once)
    if facts.degrees.pipeline == 1:
        return int(sum(per_stage))
    in_flight = chunks_in_flight(
        rank=rank,
        ranks=facts.degrees.pipeline,
        micro_batches=schedule_micro_batches(facts.parallelism, facts.rows),
        stages_per_rank=len(stages),
        schedule=facts.parallelism.pipeline_parallel_schedule,
    )
    # Chunks in flight are spread over the stages; those left over are at most the heaviest stages'.
    each, left_over = divmod(in_flight, len(stages))
    return int(each * sum(per_stage) + sum(sorted(per_stage, reverse=True)[:left_over]))


def recomputed_bytes(facts: RunFacts, stages: Sequence[Stage]) -> int:
    """Activations of the one layer that the backward pass computes anew; 0 without recomputation."""
    if facts.recomputation == "none":
        return 0
    tokens = micro_batch_tokens(facts)
    layers = [layer_bytes(facts, i) for stage in stages for i in range(stage.first, stage.stop)]
    return int(max((tokens * (layer.whole - layer.kept) + layer.per_layer for layer in layers), default=0))


def scoring_bytes(facts: RunFacts, stage: Stage) -> int:
    """A forward pass without gradient: one layer's tensors at a time, and the hidden states."""
    tokens, p = micro_batch_tokens(facts), facts.compute_bytes
    largest = max((layer_bytes(facts, i).whole for i in range(stage.first, stage.stop)), default=0.0)
    return int(tokens * (largest + 2 * p * facts.architecture.dim))


def gathered_bytes(facts: RunFacts, policy: ShardSizes, stages: Sequence[Stage]) -> int:
    """Weights and gradients that FSDP holds whole (over tensor-parallel ranks) for a moment.

    Two layers' weights (the one that computes and the one gathered ahead) in the dtype of computation, one
    layer's gradient in it, and the same in fp32 on its way into the reduction (PyTorch FSDP, Zhao et al.
    2023, arXiv 2304.11277, sections 3.2 and 3.3; FSDP2 does the same per parameter); the output projection
    stays gathered from forward to backward. With ``fsdp_reshard_after_forward = "never"``, and by default
    under pipeline parallelism, all weights of the rank's stages stay. Whole gradients are added up in fp32
    until the last micro-batch by a pipeline, and where ``batching.reduce_gradients`` waits for it; then the
    weights stay too.
    """
    units: dict[str, int] = {}
    for parameter in policy.parameters:
        if any(stage.holds(parameter) for stage in stages):
            ways = (
                facts.degrees.expert_fsdp if "experts.inner_experts" in parameter.name else facts.degrees.fsdp
            )
            unit = unit_of(parameter.name)
            units[unit] = units.get(unit, 0) + parameter.local_numel * ways
    layers = [size for unit, size in units.items() if unit.startswith("layers.")]
    largest = max(layers, default=0)
    beside = sum(units.values()) - sum(layers)
    p, policy_of_reshard = facts.compute_bytes, facts.parallelism.fsdp_reshard_after_forward
    has_pipeline = facts.degrees.pipeline > 1
    defers = facts.defers_reduction(policy.numel)
    if policy_of_reshard == "never" or (policy_of_reshard == "default" and has_pipeline) or defers:
        held = p * sum(units.values())
    else:
        held = p * (min(2, len(layers)) * largest + beside)
    gradients = 4 * sum(units.values()) if has_pipeline or defers else (p + 4) * largest
    return held + gradients


def logit_bytes(facts: RunFacts) -> int:
    """The output projection's own tensors in the backward pass of a chunk of tokens.

    ``chunked_logprobs`` holds, of ``[chunk, V]``: log-probabilities and their gradient in fp32, and the
    gradient once more in a lower dtype of computation; of ``[V, D]``: the weight's gradient in fp32, and in
    a lower dtype of computation also a chunk's share of it and the result. Tensor parallelism divides V.
    """
    a, p = facts.architecture, facts.compute_bytes
    vocabulary = -(-a.vocab_size // facts.degrees.tensor)
    chunk = min(default_chunk_tokens(vocabulary), micro_batch_tokens(facts))
    lower = p if p < 4 else 0
    return vocabulary * (chunk * (4 + 4 + lower) + a.dim * (4 + (4 + lower if lower else 0)))
