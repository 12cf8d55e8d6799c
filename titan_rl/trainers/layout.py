"""The parallel layout of a run as numbers: the mesh, the multiple of a row, the stages. Pure arithmetic.

What a layout must satisfy is in :mod:`titan_rl.trainers.layout_checks`. Nothing is imported from torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_rl.titan.architecture import Architecture

FLEX_BLOCK = 128
"""FlexAttention's block: under context parallelism each rank holds whole blocks."""
SINGLE_STAGE_SCHEDULES = ("1f1b", "gpipe")
MULTI_STAGE_SCHEDULES = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble")
V_SCHEDULES = ("zbvzerobubble", "dualpipev")


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """The mesh: how many ways each axis is cut.

    Attributes:
        replicate: Copies of the sharded model (HSDP).
        shard: Ranks that the parameters are sharded over (FSDP).
        context: Ranks that share the tokens of a row.
        tensor: Ranks that share every matrix product.
        pipeline: Ranks that the layers are spread over.
        expert: Ranks that the experts are spread over; these are ranks of the other axes.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.replicate * self.shard * self.model_parallel

    @property
    def model_parallel(self) -> int:
        """Ranks that work on one data-parallel rank's rows."""
        return self.context * self.tensor * self.pipeline

    @property
    def data_parallel(self) -> int:
        """Ranks with rows of their own."""
        return self.replicate * self.shard

    @property
    def fsdp(self) -> int:
        """Ranks that a parameter outside the experts is sharded over: context ranks too."""
        return self.shard * self.context

    @property
    def expert_fsdp(self) -> int:
        """Ranks that an expert's parameter is sharded over."""
        return self.shard * self.context * self.tensor // self.expert if self.expert > 1 else self.fsdp

    @classmethod
    def of(cls, parallelism: Any, world_size: int) -> Degrees:
        """Resolve TorchTitan's section, whose ``data_parallel_shard_degree`` may be -1 for "the rest".

        Args:
            parallelism: TorchTitan's ``ParallelismConfig``.
            world_size: Ranks of the run. With degrees that do not divide it the result has another
                ``world_size``; :func:`check_ranks` says so.
        """
        replicate = parallelism.data_parallel_replicate_degree
        others = (
            parallelism.context_parallel_degree
            * parallelism.tensor_parallel_degree
            * parallelism.pipeline_parallel_degree
        )
        shard = parallelism.data_parallel_shard_degree
        return cls(
            replicate=replicate,
            shard=max(world_size // (replicate * others), 1) if shard == -1 else shard,
            context=parallelism.context_parallel_degree,
            tensor=parallelism.tensor_parallel_degree,
            pipeline=parallelism.pipeline_parallel_degree,
            expert=parallelism.expert_parallel_degree,
        )


def row_multiple(parallelism: Any, *, is_flex: bool) -> int:
    """The number of tokens of every row must be a multiple of this.

    Sequence parallelism cuts a row into T ranks, and so does expert parallelism in every mixture of experts;
    context parallelism with its head-tail balancing into ``2 * C`` pieces
    (``torchtitan.trainer.Trainer.__init__``), and FlexAttention gives each of C ranks whole blocks of 128
    tokens.

    Args:
        parallelism: TorchTitan's section.
        is_flex: Whether the model attends with FlexAttention.

    >>> from types import SimpleNamespace
    >>> row_multiple(SimpleNamespace(tensor_parallel_degree=2, context_parallel_degree=2,
    ...     expert_parallel_degree=1, enable_sequence_parallel=True), is_flex=True)
    256
    """
    context = parallelism.context_parallel_degree
    is_cut = parallelism.enable_sequence_parallel or parallelism.expert_parallel_degree > 1
    tensor = parallelism.tensor_parallel_degree if is_cut else 1
    multiple = tensor * (2 * context if context > 1 else 1)
    return math.lcm(multiple, FLEX_BLOCK * context) if context > 1 and is_flex else multiple


def num_stages(parallelism: Any, architecture: Architecture) -> int:
    """Pipeline stages over all ranks, as TorchTitan counts them (``_get_pipeline_metadata``).

    Args:
        parallelism: TorchTitan's section.
        architecture: The policy's sizes.
    """
    if parallelism.pipeline_parallel_degree == 1:
        return 1
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    if parallelism.module_fqns_per_model_part is not None:
        return len(parallelism.module_fqns_per_model_part)
    if per_stage is not None:
        first = parallelism.pipeline_parallel_first_stage_less_layers
        last = parallelism.pipeline_parallel_last_stage_less_layers
        return -(-(architecture.num_layers + first + last) // per_stage)
    single = parallelism.pipeline_parallel_schedule.lower() in SINGLE_STAGE_SCHEDULES
    return parallelism.pipeline_parallel_degree * (1 if single else 2)


def layers_per_stage(parallelism: Any, architecture: Architecture) -> list[int]:
    """Layers of each stage, as TorchTitan spreads them (``_generate_llm_fqn_per_model_part``).

    The first stage counts the embedding, the last one the output projection, as so many layers.

    Args:
        parallelism: TorchTitan's section.
        architecture: The policy's sizes.
    """
    stages, layers = num_stages(parallelism, architecture), architecture.num_layers
    parts = parallelism.module_fqns_per_model_part
    if stages == 1:
        return [layers]
    if parts is not None:
        return [sum(name.startswith("layers.") for name in part) for part in parts]
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    each, left_over = divmod(layers + first + last, stages)
    counts = [each + (index < left_over) for index in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return counts
