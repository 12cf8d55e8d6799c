"""``titan-rl export CHECKPOINT OUT``: any checkpoint as a Hugging Face model directory, in one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from titan_rl.config.toml import load_document
from titan_rl.errors import ConfigError
from titan_rl.resilience import manifest as manifests
from titan_rl.resilience import shelf
from titan_rl.resilience.saving import CONFIG_NAME
from titan_rl.titan.lora import LoraSection
from titan_rl.titan.peft import AdapterStream, export_peft
from titan_rl.titan.reward_models import renamed_head, with_reward_head
from titan_rl.titan.value_model import value_spec
from titan_rl.titan.weights import WeightStream, export_hf, load_checkpoint
from titan_rl.trainers import assembly
from titan_rl.trainers.configuration import configure


def export(checkpoint: Path, directory: Path, *, is_adapter_only: bool = False) -> Path:
    """Convert a checkpoint, written on any number of ranks, after checking every file of it.

    The model is built from the configuration that was saved with the checkpoint.

    Args:
        checkpoint: A ``step-N`` directory.
        directory: Where to write; must not exist.
        is_adapter_only: Write the low-rank adapters in PEFT's layout, instead of the model with them merged.

    Returns:
        ``directory``: weights, ``config.json``, tokenizer and generation config; or the files of an adapter.

    Raises:
        ConfigError: the checkpoint is not complete, has no adapters where they are wanted, or its model has
            no Hugging Face counterpart; or there is something at ``directory``.
    """
    if directory.exists():
        raise ConfigError("OUT", "not exist yet", str(directory), "Name another directory.")
    trainer = _check(checkpoint)
    config = configure(load_document(str(checkpoint / CONFIG_NAME)), trainer)
    hf_config, spec, lora = assembly.hf_config(config), config.model_spec, getattr(config, "lora", None)
    if is_adapter_only and not isinstance(lora, LoraSection):
        raise ConfigError("CHECKPOINT", "have adapters ([lora])", str(checkpoint), "Leave --adapter out.")
    is_reward_model = trainer == "reward_model"
    if is_reward_model:
        spec, hf_config = value_spec(spec), with_reward_head(hf_config)
    with torch.device("meta"):
        model = spec.model.build()
    model = model.to_empty(device="cpu")
    load_checkpoint(model, str(checkpoint), where="CHECKPOINT")
    holder: Any = SimpleNamespace(config=config, model_config=spec.model)
    adapter = assembly.state_dict_adapter(holder)
    if is_adapter_only and isinstance(lora, LoraSection):
        export_peft(
            AdapterStream(model, adapter),
            directory=directory,
            section=lora,
            base_model=config.hf_assets_path,
        )
        return directory
    stream = WeightStream(model, adapter)
    export_hf(
        renamed_head(stream) if is_reward_model else stream,
        directory=directory,
        hf_config=hf_config,
        assets=config.hf_assets_path,
        is_tied=not is_reward_model and bool(getattr(model, "enable_weight_tying", False)),
    )
    return directory


def _check(checkpoint: Path) -> str:
    """Refuse a checkpoint that is not whole; returns the trainer that wrote it."""
    entry = shelf.entry(checkpoint)
    fault = entry.fault
    if entry.manifest is not None and fault is None:
        fault = manifests.find_fault(checkpoint, entry.manifest, hashes=True)
        if fault is None and CONFIG_NAME not in entry.manifest.files:
            fault = f"{checkpoint.name} has no {CONFIG_NAME}"
    if fault is not None or entry.manifest is None:
        raise ConfigError(
            "CHECKPOINT",
            "be a complete checkpoint of a run",
            fault,
            "Name another step-N directory; `titan-rl checkpoints` lists them.",
        )
    return entry.manifest.facts.trainer
