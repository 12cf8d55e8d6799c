"""Low-rank adapters in vLLM: an engine that takes them, and a new one for every version of the policy.

This module imports vLLM, like :mod:`titan_rl.generation.vllm_engine` and under the same conditions. The base
weights come through :func:`titan_rl.generation.vllm_engine.replace_weights`.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable, Mapping
from typing import Any, cast, get_args

import torch
from safetensors.torch import save_file
from vllm import LLMEngine
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest

from titan_rl.errors import GeneratorError
from titan_rl.functional.checksum import tensor_checksum
from titan_rl.generation.vllm_shared_memory import SHARED_MEMORY, launch_prefix
from titan_rl.titan.peft import CONFIG_NAME, WEIGHTS_NAME, adapter_config, target_modules

_ids = itertools.count(1)
_PREFIX = "base_model.model."
_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapter_arguments(rank: int) -> dict[str, Any]:
    """Engine arguments of a policy with adapters: room for one.

    Args:
        rank: Of the adapters.
    """
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "lora_target_modules": _LAYERS,  # not embedding and head, which it would adapt too
        "max_lora_rank": min(largest for largest in get_args(MaxLoRARanks) if largest >= rank),
    }


def load_adapter(
    engine: LLMEngine, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int
) -> tuple[LoRARequest, dict[str, int], tuple[str, ...]]:
    """Have the engine load an adapter from files in shared memory, which are gone afterwards.

    Its id and name are new at every call: vLLM takes an adapter of a known id for loaded, and keys cached
    keys and values by its name.

    Args:
        engine: With nothing in flight, and with its base weights.
        tensors: Pairs ``(PEFT's name, full tensor)``, all of one rank, to be added without a factor; consumed
            to the end.
        version: Of the policy, for the name.

    Returns:
        What requests name, checksums of what arrived, and names that the engine does not hold bit for bit
        (in its own dtype) in what it computes with.

    Raises:
        GeneratorError: a name arrived twice, or the engine did not load the adapter.
    """
    arrived: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name in arrived:
            raise GeneratorError(f"An adapter must hold each tensor once; got {name!r} twice.")
        arrived[name] = tensor.detach().to("cpu", copy=True).contiguous()
    checksums = {name: tensor_checksum(tensor) for name, tensor in arrived.items()}
    number = next(_ids)
    name = f"policy-{version}-{number}"
    directory = SHARED_MEMORY / f"{launch_prefix()}-{torch.distributed.get_rank()}-{name}"
    request = LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(directory))
    rank = next(iter(arrived.values())).shape[0]
    config = adapter_config(rank=rank, alpha=rank, targets=target_modules(arrived), base_model="")
    try:
        directory.mkdir()
        save_file(arrived, str(directory / WEIGHTS_NAME))
        (directory / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
        is_new = number not in engine.list_loras()
        if not is_new or not engine.add_lora(request) or engine.list_loras() != {number}:
            raise GeneratorError(f"vLLM must load adapter {name} alone; got {engine.list_loras()}.")
    except ValueError as error:  # its rank, or a layer that vLLM cannot adapt
        raise GeneratorError(f"vLLM must load adapter {name}; got {str(error).rstrip('.')}.") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    (held,) = engine.collective_rpc(cast(Any, held_adapter), args=(number,))
    if not engine.reset_prefix_cache():
        raise GeneratorError("The prefix cache must be dropped after a new adapter; got a refusal from vLLM.")
    return request, checksums, tuple(sorted(_differing(arrived, held)))


def _differing(arrived: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> set[str]:
    found = set(arrived) - set(held)
    for name, whole in held.items():
        tensor = arrived.get(name)
        if tensor is None:
            found |= {name} if bool(whole.any()) else set()
            continue
        rows, columns = tensor.shape
        is_padded = bool(whole[rows:].any()) or bool(whole[:, columns:].any())  # with what was there before
        if is_padded or not torch.equal(whole[:rows, :columns].cpu(), tensor.to(whole.dtype)):
            found.add(name)
    return found


def held_adapter(worker: Any, number: int) -> dict[str, torch.Tensor]:
    """What a worker's layers hold for an adapter, by PEFT's names: padded to the largest rank, 0 if nothing.

    Args:
        worker: vLLM's.
        number: Of the adapter.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    slot = manager.lora_index_to_id.index(number)
    found = {}
    for name, module in manager.modules.items():
        parent, _, last = name.rpartition(".")
        packed = manager.packed_modules_mapping.get(last, [last])
        halves = zip(packed, module.lora_a_stacked, module.lora_b_stacked, strict=False)
        for part, low, high in halves:
            for half, stacked in (("A", low), ("B", high)):
                found[f"{_PREFIX}{parent}.{part}.lora_{half}.weight"] = stacked[slot, 0]
    return found
