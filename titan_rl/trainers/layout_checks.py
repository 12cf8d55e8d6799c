"""Whether a parallel layout fits: the ranks, the model, the rows and the generator. Pure arithmetic.

Each function finds contradictions and returns them as errors that name both sides and the nearest layout that
works, so that a plan can list all of them and a run can raise the first. Nothing is imported from torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from titan_rl.errors import ConfigError
from titan_rl.trainers.layout import (
    MULTI_STAGE_SCHEDULES,
    SINGLE_STAGE_SCHEDULES,
    V_SCHEDULES,
    Degrees,
    num_stages,
    row_multiple,
)

if TYPE_CHECKING:
    from titan_rl.titan.architecture import Architecture


def contradictions(
    parallelism: Any,
    *,
    architecture: Architecture,
    world_size: int,
    seq_len: int,
    local_batch_size: int,
    generator_degree: int = 1,
    has_cuda_graphs: bool = False,
) -> list[ConfigError]:
    """Everything about a layout that cannot work.

    Args:
        parallelism: TorchTitan's section.
        architecture: The policy's sizes.
        world_size: Ranks of the run.
        seq_len: ``training.seq_len``, tokens of a row.
        local_batch_size: ``training.local_batch_size``, rows of a micro-batch.
        generator_degree: ``generator.tensor_parallel_degree``; 1 for a run without a generator.
        has_cuda_graphs: Whether ``training.disable_cuda_graphs`` is off.

    Returns:
        In the order in which they are best mended; empty when the layout fits.
    """
    # With a degree that is none, the others are computed from nonsense.
    return list(check_degrees(parallelism)) or [
        *check_ranks(parallelism, world_size),
        *check_heads(parallelism, architecture),
        *check_vocabulary(parallelism, architecture),
        *check_rows(parallelism, seq_len=seq_len, architecture=architecture),
        *check_pipeline(parallelism, architecture, local_batch_size=local_batch_size),
        *check_experts(parallelism, architecture, world_size),
        *check_generator(generator_degree, architecture, world_size),
        *check_backend(parallelism, has_cuda_graphs=has_cuda_graphs),
    ]


def check_degrees(parallelism: Any) -> Iterator[ConfigError]:
    """Degrees and sizes are counts.

    Args:
        parallelism: TorchTitan's section.
    """
    axes = ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "context_parallel")
    wanted = {f"{axis}_degree": 1 for axis in (*axes, "expert_parallel")}
    wanted |= {"pipeline_parallel_microbatch_size": 1, "pipeline_parallel_layers_per_stage": 1}
    wanted |= {f"pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}
    for key, least in wanted.items():
        value = getattr(parallelism, key)
        if value is not None and value < least:
            yield ConfigError(f"parallelism.{key}", f"be at least {least}", value, "Leave it out.")
    shard = parallelism.data_parallel_shard_degree
    if shard < 1 and shard != -1:
        yield ConfigError(
            "parallelism.data_parallel_shard_degree",
            "be at least 1, or -1 for all ranks that are left",
            shard,
            "Leave it out.",
        )


def check_backend(parallelism: Any, *, has_cuda_graphs: bool) -> Iterator[ConfigError]:
    """What TorchTitan or the losses refuse, whatever the degrees are.

    Args:
        parallelism: TorchTitan's section.
        has_cuda_graphs: Whether ``training.disable_cuda_graphs`` is off.
    """
    if parallelism.spmd_backend == "full_dtensor":
        yield ConfigError(
            "parallelism.spmd_backend",
            "be spmd_types or partial_dtensor: losses are computed on plain tensors",
            parallelism.spmd_backend,
            "Leave it out.",
        )
    if parallelism.pipeline_parallel_degree > 1 and has_cuda_graphs:
        yield ConfigError(
            "training.disable_cuda_graphs",
            "be true with parallelism.pipeline_parallel_degree > 1, as TorchTitan asks",
            False,
            "Set training.disable_cuda_graphs = true.",
        )


def check_ranks(parallelism: Any, world_size: int) -> Iterator[ConfigError]:
    """The degrees must make the number of ranks.

    Args:
        parallelism: TorchTitan's section.
        world_size: Ranks of the run.
    """
    degrees = Degrees.of(parallelism, world_size)
    shard = parallelism.data_parallel_shard_degree
    others = degrees.replicate * degrees.model_parallel
    parts = _product(
        replicate=degrees.replicate,
        pipeline=degrees.pipeline,
        context=degrees.context,
        tensor=degrees.tensor,
    )
    if world_size % others:
        nearest = max(world_size // others, 1) * others
        key = max(
            ("data_parallel_replicate", "pipeline_parallel", "context_parallel", "tensor_parallel"),
            key=lambda axis: getattr(parallelism, f"{axis}_degree"),
        )
        yield ConfigError(
            f"parallelism.{key}_degree",
            f"divide the {world_size} rank(s) together with the other degrees: {parts} = {others}",
            getattr(parallelism, f"{key}_degree"),
            f"Start {nearest} or {nearest + others} ranks, or lower a degree.",
        )
    elif shard != -1 and degrees.world_size != world_size:
        yield ConfigError(
            "parallelism.data_parallel_shard_degree",
            f"make {world_size} rank(s) when multiplied by the other degrees ({parts} = {others})",
            shard,
            f"Set {world_size // others}, leave it out (-1 takes all ranks that are left), or start "
            f"{degrees.world_size} ranks.",
        )


def check_heads(parallelism: Any, architecture: Architecture) -> Iterator[ConfigError]:
    """Tensor-parallel ranks hold whole heads.

    Args:
        parallelism: TorchTitan's section.
        architecture: The policy's sizes.
    """
    degree = parallelism.tensor_parallel_degree
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    for what, count in (("attention", heads), ("key and value", kv_heads)):
        if count % degree:
            yield ConfigError(
                "parallelism.tensor_parallel_degree",
                f"divide the model's {count} {what} heads ([model])",
                degree,
                _set_one_of(_divisors(math.gcd(heads, kv_heads)), degree),
            )
            return  # the other kind of heads has the same remedy


def check_vocabulary(parallelism: Any, architecture: Architecture) -> Iterator[ConfigError]:
    """Tensor-parallel ranks hold at least one row of the output projection each.

    Args:
        parallelism: TorchTitan's section.
        architecture: The model's sizes.
    """
    degree, rows = parallelism.tensor_parallel_degree, architecture.vocab_size
    most = -(-rows // degree)
    holders = -(-rows // most)
    if holders < degree:
        good = [d for d in range(1, degree) if -(-rows // -(-rows // d)) == d]
        yield ConfigError(
            "parallelism.tensor_parallel_degree",
            f"leave every rank an output row of the model ([model]): {rows} rows, {most} a rank, are all on "
            f"the first {holders}",
            degree,
            f"Set {good[-1]}.",
        )


def check_rows(parallelism: Any, *, seq_len: int, architecture: Architecture) -> Iterator[ConfigError]:
    """Rows are cut evenly over tensor- and context-parallel ranks, and the model reaches as far as a row.

    Args:
        parallelism: TorchTitan's section.
        seq_len: ``training.seq_len``.
        architecture: The policy's sizes.
    """
    multiple = row_multiple(parallelism, is_flex=architecture.is_flex)
    if seq_len % multiple:
        below, above = seq_len // multiple * multiple, -(-seq_len // multiple) * multiple
        yield ConfigError(
            "training.seq_len",
            f"be a multiple of {multiple}, for parallelism.tensor_parallel_degree = "
            f"{parallelism.tensor_parallel_degree} and context_parallel_degree = "
            f"{parallelism.context_parallel_degree}",
            seq_len,
            f"Set {above}{f' or {below}' if below else ''}.",
        )
    if architecture.max_seq_len and seq_len > architecture.max_seq_len:
        yield ConfigError(
            "training.seq_len",
            f"be at most {architecture.max_seq_len}, the reach of the model's rotary embedding ([model])",
            seq_len,
            f"Set {architecture.max_seq_len // multiple * multiple}.",
        )
    if parallelism.context_parallel_degree > 1 and not architecture.is_flex:
        yield ConfigError(
            "model.attn_backend",
            f"be flex with parallelism.context_parallel_degree = {parallelism.context_parallel_degree}",
            "varlen",
            'Set model.attn_backend = "flex", or context_parallel_degree = 1.',
        )
    if parallelism.context_parallel_load_balancer not in ("headtail", "ptrr", None):
        yield ConfigError(
            "parallelism.context_parallel_load_balancer",
            'be "headtail", "ptrr" or "none"',
            parallelism.context_parallel_load_balancer,
            "Leave it out.",
        )


def check_pipeline(
    parallelism: Any, architecture: Architecture, *, local_batch_size: int
) -> Iterator[ConfigError]:
    """The schedule is one that RL can run, its stages hold layers, and its micro-batches are enough.

    Args:
        parallelism: TorchTitan's section.
        architecture: The policy's sizes.
        local_batch_size: Rows that one run of the schedule takes.
    """
    degree = parallelism.pipeline_parallel_degree
    if degree == 1:
        return
    if architecture.is_tied:
        yield ConfigError(
            "parallelism.pipeline_parallel_degree",
            "be 1 for a model whose embedding and output projection are one matrix ([model]): they are on "
            "the first and the last stage",
            degree,
            "Shard more over parallelism.data_parallel_shard_degree or tensor_parallel_degree, or choose a "
            "model with tie_word_embeddings = false.",
        )
    schedule, file = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_schedule_csv
    known = SINGLE_STAGE_SCHEDULES + MULTI_STAGE_SCHEDULES
    if schedule.lower() not in known or file:
        shown = f"the file {file}" if file else schedule
        yield ConfigError(
            "parallelism.pipeline_parallel_schedule",
            "be 1F1B, GPipe, Interleaved1F1B, LoopedBFS or InterleavedZeroBubble, with which scoring passes "
            f"can share the stages of parallelism.pipeline_parallel_degree = {degree}",
            f"{shown} (V-shaped)" if shown.lower() in V_SCHEDULES else shown,
            'Set "Interleaved1F1B" for two stages per rank, or "1F1B" for one.',
        )
        return
    if parallelism.module_fqns_per_model_part is None:
        yield from _check_stages(parallelism, architecture)
    else:
        yield from _check_parts(parallelism, architecture)
    yield from _check_micro_batches(parallelism, local_batch_size)


def _check_stages(parallelism: Any, architecture: Architecture) -> Iterator[ConfigError]:
    degree, layers = parallelism.pipeline_parallel_degree, architecture.num_layers
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    single = parallelism.pipeline_parallel_schedule.lower() in SINGLE_STAGE_SCHEDULES
    stages = num_stages(parallelism, architecture)
    if per_stage is not None and not _is_good(stages, degree, single):
        wanted = f"{degree} stages" if single else f"a multiple of {degree} stages, at least {2 * degree},"
        effective = layers + first + last
        best = next(
            (n for n in range(effective, 0, -1) if _is_good(-(-effective // n), degree, single)), None
        )
        yield ConfigError(
            "parallelism.pipeline_parallel_layers_per_stage",
            f"make {wanted} of {layers} layers for parallelism.pipeline_parallel_degree = {degree} and "
            f"schedule {parallelism.pipeline_parallel_schedule}",
            f"{per_stage}: {stages} stages",
            "Leave it out." if best is None else f"Set {best}, or leave it out.",
        )
    elif (layers + first + last) // stages < max(first, last, 1):
        most = max((layers + first + last) // max(first, last, 1) // (1 if single else 2), 1)
        yield ConfigError(
            "parallelism.pipeline_parallel_degree",
            f"leave a layer for each of {stages} stages: the model has {layers} layers ([model]), and the "
            f"first and the last stage have {first} and {last} fewer",
            degree,
            f"Set at most {min(most, layers)}, or pipeline_parallel_first_stage_less_layers = "
            "pipeline_parallel_last_stage_less_layers = 0.",
        )


def _check_parts(parallelism: Any, architecture: Architecture) -> Iterator[ConfigError]:
    """Stages that the user spelled out: TorchTitan drops what none names, and runs twice what two name."""
    key = "parallelism.module_fqns_per_model_part"
    parts, last_layer = parallelism.module_fqns_per_model_part, architecture.num_layers - 1
    wanted = ["tok_embeddings", *(f"layers.{i}" for i in range(architecture.num_layers)), "norm", "lm_head"]
    # What else a model has may stand anywhere; within a stage the model decides the order.
    place = {name: index for index, name in enumerate(wanted)}
    named = [name for part in parts for name in sorted(set(part) & place.keys(), key=place.__getitem__)]
    got = ""
    if missing := [name for name in wanted if name not in named]:
        got = f"without {', '.join(missing)}"
    elif twice := [name for name in wanted if named.count(name) > 1]:
        got = f"{', '.join(twice)} twice"
    elif named != wanted:
        late = next(b for a, b in itertools.pairwise(named) if place[a] > place[b])
        got = f"{late} too late"
    if got:
        yield ConfigError(
            key,
            f"name each of tok_embeddings, layers.0 to layers.{last_layer} ([model]), norm and lm_head once, "
            "in the order of the model",
            got,
            "Mend it, or leave it out.",
        )
    degree, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    single = schedule.lower() in SINGLE_STAGE_SCHEDULES
    if not _is_good(len(parts), degree, single):
        count = f"{degree} stages" if single else f"a multiple of {degree} stages, at least {2 * degree},"
        yield ConfigError(
            key,
            f"make {count} for parallelism.pipeline_parallel_degree = {degree} and schedule {schedule}",
            f"{len(parts)} stages",
            "Mend it, or leave it out.",
        )


def _is_good(stages: int, degree: int, single: bool) -> bool:
    """Whether each rank gets equally many stages: one, or at least two."""
    return stages == degree if single else stages % degree == 0 and stages > degree


def _check_micro_batches(parallelism: Any, local_batch_size: int) -> Iterator[ConfigError]:
    degree, size = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_microbatch_size
    schedule = parallelism.pipeline_parallel_schedule.lower()
    if local_batch_size % size:
        yield ConfigError(
            "training.local_batch_size",
            f"be a multiple of parallelism.pipeline_parallel_microbatch_size = {size}",
            local_batch_size,
            f"Set {-(-local_batch_size // size) * size}.",
        )
        return
    count = local_batch_size // size
    if schedule == "1f1b" and count < degree:
        yield ConfigError(
            "training.local_batch_size",
            f"give 1F1B at least as many micro-batches of {size} row(s) as "
            f"parallelism.pipeline_parallel_degree = {degree}",
            local_batch_size,
            f"Set {degree * size} or more; more also make the bubble smaller.",
        )
    rounds = max(count // degree, 1)
    if schedule in ("interleaved1f1b", "interleavedzerobubble") and count % rounds:
        yield ConfigError(
            "training.local_batch_size",
            f"give {parallelism.pipeline_parallel_schedule} a multiple of {rounds} micro-batches: {count} on "
            f"parallelism.pipeline_parallel_degree = {degree} go in {rounds} rounds",
            local_batch_size,
            f"Set {count // degree * degree * size} or {-(-count // degree) * degree * size}.",
        )


def check_experts(parallelism: Any, architecture: Architecture, world_size: int) -> Iterator[ConfigError]:
    """Experts and ranks divide evenly over expert-parallel ranks.

    Args:
        parallelism: TorchTitan's section.
        architecture: The policy's sizes.
        world_size: Ranks of the run.
    """
    degree, experts = parallelism.expert_parallel_degree, architecture.num_experts
    if degree == 1:
        return
    key = "parallelism.expert_parallel_degree"
    if not experts:
        yield ConfigError(key, "be 1 for a model without experts ([model])", degree, "Remove it.")
        return
    degrees = Degrees.of(parallelism, world_size)
    ranks = degrees.shard * degrees.context * degrees.tensor
    remedy = _set_one_of(_divisors(math.gcd(experts, ranks)), degree)
    if experts % degree:
        yield ConfigError(key, f"divide the model's {experts} experts ([model])", degree, remedy)
    elif ranks % degree:
        product = _product(shard=degrees.shard, context=degrees.context, tensor=degrees.tensor)
        yield ConfigError(
            key,
            f"divide the {ranks} ranks that hold one copy of a layer (parallelism: {product})",
            degree,
            remedy,
        )


def check_generator(degree: int, architecture: Architecture, world_size: int) -> Iterator[ConfigError]:
    """Generator groups divide the ranks, and vLLM can cut the model over one.

    Args:
        degree: ``generator.tensor_parallel_degree``.
        architecture: The policy's sizes.
        world_size: Ranks of the run.
    """
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    good = [d for d in _divisors(math.gcd(world_size, heads)) if kv_heads % d == 0 or d % kv_heads == 0]
    if degree in good:
        return
    if world_size % degree:
        constraint = f"divide the number of ranks ({world_size})"
    elif heads % degree:
        constraint = f"divide the model's {heads} attention heads ([model])"
    else:
        constraint = f"divide the model's {kv_heads} key and value heads ([model]), or be a multiple"
    yield ConfigError("generator.tensor_parallel_degree", constraint, degree, _set_one_of(good, degree))


def _product(**degrees: int) -> str:
    return " x ".join(f"{name} {value}" for name, value in degrees.items())


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _set_one_of(good: list[int], degree: int) -> str:
    """Advise the largest degree that works and is not above the one asked for."""
    nearest = max((d for d in good if d <= degree), default=good[0])
    return f"Set {nearest}; possible are {', '.join(map(str, good))}."
