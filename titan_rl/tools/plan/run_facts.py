"""What the arithmetic of a plan is computed from, read off a run's configuration once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from titan_rl.algorithms.preset import derive_needs
from titan_rl.config.choice import build
from titan_rl.generation.vllm import VllmGenerator
from titan_rl.titan.architecture import Architecture, architecture_of
from titan_rl.titan.buckets import BUCKET_BYTES
from titan_rl.titan.sections import section_from_optimizer
from titan_rl.titan.sharded_model import MOST_DEFERRED_BYTES
from titan_rl.trainers.layout import Degrees

GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2}
_RECOMPUTED = {"SelectiveAC.Config": "selective", "FullAC.Config": "full", "MemoryBudgetAC.Config": "budget"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorFacts:
    """The generator of each group of ranks.

    Attributes:
        degree: Ranks that share one copy of the weights.
        memory_fraction: Of the device, for weights and KV cache together; 0 where the cache has a size of its
            own.
        kv_cache_bytes: Size of the cache on a CPU; 0 where the fraction decides.
        max_num_seqs: Most requests decoded together.
        batched_tokens: Most tokens of one forward pass.
        sleeps: Whether its memory is free while the trainer works.
        is_vllm: False for the local generator, whose cache grows with the batch.
    """

    degree: int = 1
    memory_fraction: float = 0.0
    kv_cache_bytes: int = 0
    max_num_seqs: int = 256
    batched_tokens: int = 16384
    sleeps: bool = False
    is_vllm: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run as numbers.

    Attributes:
        world_size: Ranks.
        degrees: The mesh.
        architecture: The policy's sizes.
        parallelism: TorchTitan's section, for the pipeline's stages and schedule.
        device_type: ``cuda`` or ``cpu``: what the run will have, not what plans it.
        storage_bytes: Of a number of the parameters, gradients and optimiser state.
        compute_bytes: Of a number of the activations and of gathered weights.
        moment_bytes: Of a number of an optimiser's moments.
        seq_len: Tokens of a row.
        rows: Rows of a micro-batch (of a run of the pipeline's schedule).
        recomputation: ``none``, ``selective``, ``full`` or ``budget``.
        memory_budget: Share of activations kept with ``budget``.
        prompts: Of an iteration.
        group_size: Rollouts per prompt.
        prompt_tokens: Longest prompt.
        completion_tokens: Longest completion.
        steps: Optimiser steps of the run.
        steps_per_iteration: K.
        needs_old: Whether the old policy is scored.
        needs_reference: Whether there is a reference.
        needs_critic: Whether there is a critic.
        has_teacher: Whether there is a teacher.
        has_reward_model: Whether a reward model scores rollouts.
        needs_baseline: Whether each prompt also gets a greedy rollout.
        reduce_gradients: ``batching.reduce_gradients``.
        offloads_policy: Parameters, gradients and optimiser state are in host memory.
        offloads_reference: The reference is in host memory.
        offloads_teacher: The teacher is in host memory.
        bucket_bytes: Weights that are gathered at once for the generator.
        generator: How completions are sampled.
    """

    world_size: int
    degrees: Degrees
    architecture: Architecture
    parallelism: Any
    device_type: str
    storage_bytes: int
    compute_bytes: int
    moment_bytes: int
    seq_len: int
    rows: int
    recomputation: str
    memory_budget: float = 1.0
    prompts: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int
    steps: int
    steps_per_iteration: int
    needs_old: bool = False
    needs_reference: bool = False
    needs_critic: bool = False
    has_teacher: bool = False
    has_reward_model: bool = False
    needs_baseline: bool = False
    reduce_gradients: str = "every_micro_batch"
    offloads_policy: bool = False
    offloads_reference: bool = False
    offloads_teacher: bool = False
    bucket_bytes: int = BUCKET_BYTES
    generator: GeneratorFacts

    @property
    def sample_tokens(self) -> int:
        """Longest sample: a prompt and its completion."""
        return self.prompt_tokens + self.completion_tokens

    def defers_reduction(self, numel: int) -> bool:
        """Whether gradients are summed over FSDP's ranks after the last micro-batch only.

        As :meth:`titan_rl.titan.sharded_model.ShardedModel.reduce_gradients` decides.

        Args:
            numel: Numbers of the model.
        """
        is_small = 4 * numel <= MOST_DEFERRED_BYTES
        return self.reduce_gradients == "last_micro_batch" or (self.reduce_gradients == "auto" and is_small)


def read_run(config: Any, *, world_size: int, device_type: str) -> RunFacts:
    """Read a run's configuration.

    Args:
        config: An RL trainer's, from :func:`titan_rl.trainers.configuration.configure`.
        world_size: Ranks that torchrun will start.
        device_type: ``cuda`` or ``cpu``, of the run.
    """
    training, recomputation = config.training, config.activation_checkpoint
    storage = _BYTES[training.dtype]
    needs = derive_needs(
        build(config.advantage), config.loss.build(), steps_per_iteration=config.algorithm.steps_per_iteration
    )
    optimizer = section_from_optimizer(config.optimizer)
    architecture = architecture_of(config.model_spec.model)
    return RunFacts(
        world_size=world_size,
        degrees=Degrees.of(config.parallelism, world_size),
        architecture=dataclasses.replace(architecture, is_flex=config.model.attn_backend != "varlen"),
        parallelism=config.parallelism,
        device_type=device_type,
        storage_bytes=storage,
        compute_bytes=_BYTES[training.mixed_precision_param],
        moment_bytes=2 if optimizer.implementation == "fused_opt_states_bf16" else storage,
        seq_len=training.seq_len,
        rows=training.local_batch_size,
        recomputation=_RECOMPUTED.get(type(recomputation).__qualname__, "none"),
        memory_budget=getattr(recomputation, "memory_budget", 1.0),
        prompts=config.data.prompts_per_iteration,
        group_size=config.sampling.group_size,
        prompt_tokens=config.data.max_prompt_tokens,
        completion_tokens=config.sampling.max_tokens,
        steps=training.steps,
        steps_per_iteration=config.algorithm.steps_per_iteration,
        needs_old=needs.old,
        needs_reference=needs.reference,
        needs_critic=needs.critic,
        has_teacher=config.teacher is not None,
        has_reward_model=config.reward_model is not None,
        needs_baseline=needs.greedy_baseline,
        reduce_gradients=config.batching.reduce_gradients,
        offloads_policy=training.enable_cpu_offload,
        offloads_reference=config.reference.offload_to_cpu,
        offloads_teacher=config.teacher is not None and config.teacher.offload_to_cpu,
        bucket_bytes=config.weight_sync.bucket_bytes,
        generator=_generator_facts(config, device_type),
    )


def _generator_facts(config: Any, device_type: str) -> GeneratorFacts:
    generator = config.generator
    if not isinstance(generator, VllmGenerator.Config):
        num = getattr(generator, "max_num_seqs", 64)
        return GeneratorFacts(max_num_seqs=num, is_vllm=False)
    is_cuda = device_type == "cuda"
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    return GeneratorFacts(
        degree=generator.tensor_parallel_degree,
        memory_fraction=generator.gpu_memory_utilization if is_cuda else 0.0,
        kv_cache_bytes=0 if is_cuda else int(generator.kv_cache_gib * GIB),
        max_num_seqs=generator.max_num_seqs,
        batched_tokens=generator.max_num_batched_tokens or (16384 if is_cuda else max(8192, longest)),
        sleeps=is_cuda and generator.enable_sleep_mode,
    )
