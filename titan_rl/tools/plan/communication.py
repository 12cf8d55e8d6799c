"""Bytes that a rank sends, per optimiser step and per weight sync. Pure arithmetic.

Ring algorithms (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002): of a tensor of S bytes on n ranks
each sends ``(n - 1) / n S`` for an all-gather or a reduce-scatter, and twice that for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from titan_rl.titan.buckets import in_buckets, peak_bytes
from titan_rl.titan.meta_model import ShardSizes, unit_of
from titan_rl.tools.plan.run_facts import RunFacts
from titan_rl.trainers.batch_arithmetic import BatchPlan


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends.

    Attributes:
        per_step: By axis of the mesh, of an optimiser step with its share of scoring passes.
        per_sync: Of a weight sync.
    """

    per_step: dict[str, int]
    per_sync: int


def traffic(facts: RunFacts, policy: ShardSizes, batch: BatchPlan) -> Traffic:
    """Count what crosses the links, axis by axis.

    Args:
        facts: The run.
        policy: Sizes.
        batch: Counts; full length is assumed.
    """
    passes = batch.micro_batches_per_rank
    scorings = facts.needs_old + facts.needs_reference + facts.needs_critic
    scorings += facts.has_teacher + facts.has_reward_model
    rows = facts.rows * passes

    def step(count: Callable[[int], int]) -> int:
        """The policy's step with all scoring passes; the critic's is as much without them."""
        return count(scorings) + facts.needs_critic * count(0)

    per_step = {
        "fsdp": step(lambda n: _fsdp(facts, policy, passes=passes, scorings=n)),
        "replicate": step(lambda _: _replicate(facts, policy)),
        "tensor": step(lambda n: _tensor(facts, rows, forward_only=n)),
        "context": step(lambda n: _context(facts, rows, forward_only=n)),
        "pipeline": step(lambda n: _pipeline(facts, rows, forward_only=n)),
        "expert": step(lambda n: _expert(facts, rows, forward_only=n)),
    }
    return Traffic({axis: size for axis, size in per_step.items() if size}, sync_bytes(facts, policy))


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _whole(facts: RunFacts, policy: ShardSizes) -> list[tuple[int, int]]:
    """Pairs (numbers that FSDP gathers on a rank, ranks that it gathers from): experts apart."""
    sizes: dict[int, int] = {}
    for parameter in policy.parameters:
        is_expert = "experts.inner_experts" in parameter.name
        ways = facts.degrees.expert_fsdp if is_expert else facts.degrees.fsdp
        sizes[ways] = sizes.get(ways, 0) + parameter.local_numel * ways // facts.degrees.pipeline
    return [(size, ways) for ways, size in sizes.items()]


def _fsdp(facts: RunFacts, policy: ShardSizes, *, passes: int, scorings: int) -> int:
    """Gathers in the dtype of computation, reductions in fp32 in every micro-batch or in the last.

    Each forward-backward gathers twice where weights are given back after the forward pass, once otherwise; a
    pipeline gathers once for all micro-batches, and reduces once.
    """
    reshard = facts.parallelism.fsdp_reshard_after_forward
    has_pipeline = facts.degrees.pipeline > 1
    keeps = reshard == "never" or (reshard == "default" and has_pipeline)
    defers = facts.defers_reduction(policy.numel)
    # Where reductions wait, a micro-batch finds the weights that the backward pass before it gathered.
    gathers = passes if keeps else passes + 1 if defers else 2 * passes
    reductions = 1 if defers else passes
    total = 0.0
    for size, ways in _whole(facts, policy):
        total += size * _share(ways) * ((gathers + scorings * passes) * facts.compute_bytes + reductions * 4)
    return int(total)


def _replicate(facts: RunFacts, policy: ShardSizes) -> int:
    """An all-reduce of the shard's gradient in fp32 over the copies of the model (HSDP), once."""
    shard = sum(parameter.local_numel for parameter in policy.parameters) // facts.degrees.pipeline
    return int(2 * _share(facts.degrees.replicate) * shard * 4)


def _layers(facts: RunFacts) -> float:
    return facts.architecture.num_layers / facts.degrees.pipeline


def _tokens(facts: RunFacts, rows: int) -> float:
    return rows * facts.seq_len / facts.degrees.context


def _tensor(facts: RunFacts, rows: int, *, forward_only: int) -> int:
    """Two gathers and two reductions of the hidden states in each layer's forward pass, four in its backward.

    Megatron's sequence parallelism (Korthikanti et al. 2022, section 4.2.2; without it two all-reduces, the
    same bytes). Recomputation repeats the forward pass's gathers, and its reductions unless they were kept.
    """
    degree = facts.degrees.tensor
    hidden = facts.compute_bytes * facts.architecture.dim * _tokens(facts, rows) * _share(degree)
    repeated = {"none": 0, "selective": 2, "full": 4, "budget": 2}[facts.recomputation]
    return int(hidden * _layers(facts) * (4 * (1 + forward_only) + 4 + repeated))


def _context(facts: RunFacts, rows: int, *, forward_only: int) -> int:
    """Keys and values gathered over the row in each layer, and their gradients reduced."""
    a, degree = facts.architecture, facts.degrees.context
    numbers = a.num_kv_heads * (a.qk_head_dim + a.v_head_dim) / facts.degrees.tensor
    row = facts.compute_bytes * numbers * rows * facts.seq_len * _share(degree)
    repeated = 0 if facts.recomputation == "none" else 1
    return int(row * _layers(facts) * (2 + repeated + forward_only))


def _pipeline(facts: RunFacts, rows: int, *, forward_only: int) -> int:
    """Hidden states to the next stage, and their gradients back; a rank in the middle sends both."""
    if facts.degrees.pipeline == 1:
        return 0
    split = facts.degrees.tensor if facts.parallelism.enable_sequence_parallel else 1
    hidden = facts.compute_bytes * facts.architecture.dim * _tokens(facts, rows) / split
    single = facts.parallelism.pipeline_parallel_schedule.lower() in ("1f1b", "gpipe")
    return int(hidden * (1 if single else 2) * (2 + forward_only))


def _expert(facts: RunFacts, rows: int, *, forward_only: int) -> int:
    """Each token to its ``top_k`` experts and back, in both directions of the pass."""
    a, degree = facts.architecture, facts.degrees.expert
    copies = sum(x.top_k for x in a.experts if x is not None) / facts.degrees.pipeline
    split = facts.degrees.tensor
    exchanged = copies * facts.compute_bytes * a.dim * _tokens(facts, rows) / split * _share(degree)
    return int(exchanged * (2 * (1 + forward_only) + 2))


def sync_bytes(facts: RunFacts, policy: ShardSizes) -> int:
    """Bytes that a rank sends so that every rank has every tensor once, whole, as the shards store it."""
    ranks = facts.degrees.shard * facts.degrees.context * facts.degrees.tensor * facts.degrees.pipeline
    return int(policy.numel * facts.storage_bytes * _share(ranks))


def transit_bytes(facts: RunFacts, policy: ShardSizes) -> int:
    """Most that a weight sync holds beyond the shards and the generator's copy.

    Whole tensors in buckets, as :func:`titan_rl.titan.buckets.full_buckets` gathers them; where nothing is
    sharded one tensor, which the state-dict adapter may have to copy.
    """
    sizes = [
        [parameter.numel * facts.storage_bytes for parameter in unit]
        for _, unit in groupby(policy.parameters, key=lambda parameter: unit_of(parameter.name))
    ]
    degrees = facts.degrees
    if degrees.fsdp * degrees.tensor * degrees.pipeline == 1:
        return max(max(unit) for unit in sizes)
    buckets = in_buckets(sizes, size_of=int, bucket_bytes=facts.bucket_bytes)
    return peak_bytes(map(sum, buckets), bucket_bytes=facts.bucket_bytes)
