"""Low-rank adapters in the layout of Hugging Face's PEFT: its names, its rows, its two files.

For exports and for engines that take adapters. The weights that adapters are merged into are
:mod:`titan_rl.titan.weights`'s.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from titan_rl.titan.buckets import BUCKET_BYTES, full_buckets, one_by_one
from titan_rl.titan.lora import A, B, LoraSection
from titan_rl.titan.sharded_model import ShardedModel
from titan_rl.titan.weights import adapted_layers_of

_PREFIX = "base_model.model."
WEIGHTS_NAME, CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"


class AdapterStream:
    """The policy's adapters as ``(PEFT's name, full tensor)`` pairs, in one order on all ranks."""

    def __init__(
        self,
        model: nn.Module | ShardedModel,
        adapter: Any,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        is_scaled: bool = False,
    ) -> None:
        """Prepare the stream.

        Args:
            model: The policy, sharded or not.
            adapter: TorchTitan's state-dict adapter of this model.
            bucket_bytes: Most that is gathered ahead of whoever reads the stream.
            is_scaled: Whether B is multiplied by ``alpha / rank``, for whoever adds B A as it is.
        """
        self._is_scaled = is_scaled
        self._model, self._adapter, self._bucket_bytes = model, adapter, bucket_bytes
        self._layers = adapted_layers_of(model)
        self._scales = {name: layer._lora_scaling for name, layer in self._layers.items()}
        self._names: dict[str, str] = {}
        self._rows: dict[str, torch.Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield A ``[r, in]`` and B ``[out, r]`` of every layer. All ranks must consume all of it."""
        names = {layer + half for layer in self._layers for half in (A, B)}
        options: dict[str, Any] = {"bucket_bytes": self._bucket_bytes, "names": names}
        if isinstance(self._model, ShardedModel):
            tensors = self._model.full_state(**options)
        else:
            tensors = one_by_one(full_buckets(self._model, **options))
        for key, tensor in tensors:
            layer = key.removesuffix(A).removesuffix(B)
            module = _PREFIX + self._hf_name(layer)
            if key.endswith(A):
                yield f"{module}.lora_A.weight", tensor
            else:
                rows = tensor[self._rows[layer].to(tensor.device)]
                yield f"{module}.lora_B.weight", rows * self._scales[layer] if self._is_scaled else rows

    def _hf_name(self, layer: str) -> str:
        """Hugging Face's name of a layer. Also finds out in which order its outputs stand there.

        TorchTitan's Llama has the rows of queries and keys in an order of its own.
        """
        if layer not in self._names:
            num_rows, num_columns = self._layers[layer].weight.shape
            rows = torch.arange(num_rows)[:, None].expand(num_rows, num_columns)
            ((name, moved),) = self._adapter.to_hf({f"{layer}.weight": rows}).items()
            self._names[layer], self._rows[layer] = name.removesuffix(".weight"), moved[:, 0].contiguous()
        return self._names[layer]


def target_modules(names: Iterable[str]) -> list[str]:
    """Hugging Face's names of the kinds of layers that a PEFT state dict adapts.

    >>> target_modules(["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"])
    ['q_proj']
    """
    return sorted({name.split(".")[-3] for name in names})


def adapter_config(*, rank: int, alpha: float, targets: list[str], base_model: str) -> dict[str, Any]:
    """Contents of ``adapter_config.json``.

    Args:
        rank: Of the adapters.
        alpha: ``rank`` times the factor of what they add.
        targets: Hugging Face's names, from :func:`target_modules`.
        base_model: Where the frozen weights are.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "modules_to_save": None,
    }


def export_peft(
    stream: Iterable[tuple[str, torch.Tensor]], *, directory: Path, section: LoraSection, base_model: str
) -> None:
    """Write a directory that PEFT and vLLM load. All ranks call it; rank 0 writes.

    The directory appears complete or not at all.

    Args:
        stream: From :class:`AdapterStream`, consumed on all ranks.
        directory: Where to write; replaced if it exists.
        section: ``[lora]``.
        base_model: Where the frozen weights are.
    """
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    tensors = {}
    for name, tensor in stream:
        if is_writer:
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    if not is_writer:
        return
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(tensors, str(partial / WEIGHTS_NAME), metadata={"format": "pt"})
    content = adapter_config(
        rank=section.rank, alpha=section.alpha, targets=target_modules(tensors), base_model=base_model
    )
    (partial / CONFIG_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
