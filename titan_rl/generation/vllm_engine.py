"""Everything that touches vLLM's API, version 0.32 and 0.33: build, ask, read back, replace weights.

This module imports vLLM, which reads its environment at that moment: only :mod:`titan_rl.generation.vllm`
imports it, after :func:`titan_rl.generation.vllm_env.set_vllm_environment`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from vllm import EngineArgs, LLMEngine, RequestOutput
from vllm import SamplingParams as VllmSamplingParams
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import core as vllm_core

from titan_rl.errors import GeneratorError
from titan_rl.functional.checksum import parameter_checksums, tensor_checksum
from titan_rl.generation.vllm_shared_memory import name_after_launch, remove_names
from titan_rl.types import Completion, FinishReason, GenerationRequest

_CPU_BATCHED_TOKENS = 8192


def build_engine(arguments: Mapping[str, Any]) -> LLMEngine:
    """Build an engine in this process, as one rank of a torchrun launch, with random weights.

    Fixed here is what the rest of this package relies on: tokens in and out, log-probabilities of the
    distribution that was sampled from, and no sampling default out of the model's own directory.

    Args:
        arguments: The other fields of vLLM's ``EngineArgs``.
    """
    if current_platform.is_cpu():
        name_after_launch()
    # Its own clean-up, at close and when collected, destroys every process group, the trainer's included.
    vllm_core.cleanup_dist_env_and_memory = _destroy_own_groups
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            distributed_executor_backend="external_launcher",
            load_format="dummy",
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            trust_remote_code=False,
            disable_log_stats=True,
            **arguments,
        )
    )
    if current_platform.is_cpu():
        remove_names()
    # On every push it warns of layers without weights (RotaryEmbedding). What lacks weights, we report. Set
    # last, because building the engine configures logging.
    logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
    return engine


def _destroy_own_groups(shutdown_ray: bool = False) -> None:
    """Stand in for vLLM's clean-up; Ray is not in use."""
    if torch.distributed.is_initialized():
        destroy_model_parallel()
    gc.collect()


def cpu_arguments(max_model_len: int, kv_cache_gib: float) -> dict[str, Any]:
    """Engine arguments for CPU: eager, KV cache of a fixed size, and prompts in one piece.

    Chunked prefill moves the random generator of a seeded request back, which a CPU generator cannot do
    (``RuntimeError: CPU Generator does not use offset``). vLLM warns that switching it off is unofficial.
    """
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": int(kv_cache_gib * 2**30),
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(_CPU_BATCHED_TOKENS, max_model_len),
    }


def add_completion_request(engine: LLMEngine, request: GenerationRequest, *, adapter: Any = None) -> None:
    """Queue one completion. Only our stop tokens stop it: the model's own end token is ignored.

    torch's CPU generator keeps the low 32 bits of a seed. The high bits are therefore mixed into them, so
    that seeds that differ in the high bits alone differ there too; the mapping is one to one.

    Args:
        engine: Where it is queued.
        request: What is asked.
        adapter: A ``LoRARequest`` from :func:`titan_rl.generation.vllm_adapters.load_adapter`, or None.
    """
    sampling = request.sampling
    params = VllmSamplingParams(
        n=1,
        seed=request.seed ^ (request.seed >> 32),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
    engine.add_request(request.id, prompt, params, lora_request=adapter)


def add_probe_request(
    engine: LLMEngine, request_id: str, token_ids: Sequence[int], *, adapter: Any = None
) -> None:
    """Queue the scoring of given tokens. vLLM computes it at temperature 1, whatever the request says."""
    params = VllmSamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine.add_request(request_id, {"prompt_token_ids": list(token_ids)}, params, lora_request=adapter)


def read_completion(output: RequestOutput, policy_version: int) -> Completion:
    """Turn a finished output into a completion."""
    sampled = output.outputs[0]
    token_ids = tuple(sampled.token_ids)
    entries = sampled.logprobs or []
    return Completion(
        request_id=output.request_id,
        token_ids=token_ids,
        logprobs=tuple(
            entry[token].logprob for entry, token in zip(entries, token_ids, strict=True) if entry
        ),
        finish_reason=FinishReason(sampled.finish_reason),
        policy_versions=((0, policy_version),),
    )


def read_probe(output: RequestOutput) -> tuple[float, ...]:
    """Log-probabilities of tokens 1 to N - 1 of a scored sequence (vLLM's entry 0 is None)."""
    token_ids, entries = output.prompt_token_ids or [], output.prompt_logprobs or []
    return tuple(
        entry[token].logprob for entry, token in zip(entries, token_ids, strict=True) if entry is not None
    )


def replace_weights(
    engine: LLMEngine, tensors: Iterable[tuple[str, torch.Tensor]], *, is_delta: bool = False
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Stream tensors into the engine's model and drop its cached keys and values.

    On a CPU vLLM repacks linear weights after loading and frees the originals, so that its ``reload_weights``
    is the only way in.

    Args:
        engine: With nothing in flight.
        tensors: Pairs ``(Hugging Face name, full tensor)``; consumed to the end.
        is_delta: Layers that get no tensor keep what they hold. One that gets some must get all of it.

    Returns:
        Checksums by name, and the parameters of vLLM's model that were not, or not wholly, written to.

    Raises:
        GeneratorError: A name arrived twice, or the cache could not be dropped.
    """
    checksums: dict[str, int] = {}
    arriving = _summed(tensors, checksums)
    (unwritten,) = engine.collective_rpc(cast(Any, _reload_audited), args=(arriving, is_delta))
    if not engine.reset_prefix_cache():
        raise GeneratorError(
            "The prefix cache must be dropped after new weights; got a refusal from vLLM. "
            "Load weights only while nothing is in flight."
        )
    return checksums, tuple(unwritten)


def held_checksums(engine: LLMEngine) -> dict[str, int]:
    """Checksums of the parameters of vLLM's model on this rank, by vLLM's names and in vLLM's layout."""
    (checksums,) = engine.collective_rpc(cast(Any, _parameter_checksums))
    return checksums


def _parameter_checksums(worker: Any) -> dict[str, int]:
    model = worker.model_runner.get_model()
    checksums = parameter_checksums(model)
    for name, module in model.named_modules():
        for half in ("lora_a_stacked", "lora_b_stacked"):  # where adapters lie: no parameters
            for number, tensor in enumerate(vars(module).get(half) or ()):
                checksums[f"{name}.{half}.{number}"] = tensor_checksum(tensor)
    return checksums


def _summed(
    tensors: Iterable[tuple[str, torch.Tensor]], checksums: dict[str, int]
) -> Iterable[tuple[str, torch.Tensor]]:
    """Pass tensors on, and note the checksum of each."""
    for name, tensor in tensors:
        if name in checksums:
            raise GeneratorError(
                f"A weight update must hold each tensor once; got {name!r} twice. "
                "Check the state-dict adapter of the model."
            )
        checksums[name] = tensor_checksum(tensor)
        yield name, tensor


def _reload_audited(worker: Any, tensors: Iterable[tuple[str, torch.Tensor]], is_delta: bool) -> list[str]:
    """Run vLLM's own reload in its worker, and look at its bookkeeping before it is cleared.

    ``model.load_weights`` is wrapped on the instance for the time of the call: that is the one moment between
    "all tensors were handed over" and "layers that miss some fall back to their old contents".
    """
    model = worker.model_runner.get_model()
    load = model.load_weights
    unwritten: list[str] = []

    def audited(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        try:
            loaded = load(weights)
        except BaseException:
            # Clears what was buffered; otherwise the next update would be mixed with this one.
            finalize_layerwise_reload(model, worker.model_runner.model_config)
            raise
        unwritten.extend(_unwritten_parameters(model, loaded or set(), is_delta=is_delta))
        return loaded

    model.load_weights = audited
    if current_platform.is_cpu():
        _forget_packed_experts(model)
    try:
        worker.reload_weights(weights_iterator=tensors)
    finally:
        del model.load_weights
    return unwritten


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Make vLLM pack the experts of MoE layers again.

    On a CPU it packs them when it builds their kernel, which it does once: after a reload the kernel would
    read unpacked weights as packed ones.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            cast(Any, method).moe_kernel = None


def _unwritten_parameters(model: torch.nn.Module, loaded: set[str], *, is_delta: bool) -> list[str]:
    """Names of parameters that miss elements, from vLLM's layerwise bookkeeping during a reload.

    A layer that received all its elements has been processed, and its record cleared. One that has not is
    listed, unless only padding is missing. Each HF name arrives once and vLLM maps names to parameters one to
    one, so that "all elements" means "each element once".

    Args:
        model: vLLM's model, between loading and finalising.
        loaded: Parameter names that ``model.load_weights`` returned, for the few that the bookkeeping skips.
        is_delta: Layers that nothing was loaded into are left out.
    """
    unwritten = []
    for module_name, module in model.named_modules():
        info = get_layerwise_info(module)
        if is_delta and info.can_load() and not info.load_numel:
            continue
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        prefix = f"{module_name}." if module_name else ""
        unwritten += [
            prefix + name for name in parameters if name in SKIP_LOAD_TENSORS and prefix + name not in loaded
        ]
        counted = {name: p for name, p in parameters.items() if name not in SKIP_LOAD_TENSORS}
        expected = sum(_num_loadable(module, name, p) for name, p in counted.items())
        if not info.can_load() or info.load_numel >= expected:
            continue
        touched = {name for name, _ in info.loaded_weights}
        untouched = [name for name in counted if name not in touched]
        unwritten += [prefix + name for name in untouched or counted]
    return unwritten


def _num_loadable(module: torch.nn.Module, name: str, parameter: torch.Tensor) -> int:
    """Elements that a checkpoint holds for this rank's parameter: all but vLLM's padding."""
    if isinstance(module, VocabParallelEmbedding):
        rows = module.shard_indices.num_org_elements + module.shard_indices.num_added_elements
        return rows * (parameter.numel() // parameter.shape[0])
    return getattr(parameter, "weight_loader_numel", parameter.numel())
