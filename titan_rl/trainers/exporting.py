"""Write the trained model in Hugging Face layout, and low-rank adapters in PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl import heartbeat
from titan_rl.titan.lora import LoraSection
from titan_rl.titan.peft import AdapterStream, export_peft
from titan_rl.titan.sharded_model import ShardedModel
from titan_rl.titan.weights import WeightStream, export_hf, is_tied
from titan_rl.trainers import assembly

if TYPE_CHECKING:
    from titan_rl.trainers.rl import RLTrainer


def export_adapter(trainer: RLTrainer) -> Path:
    """Export the policy's low-rank adapters to ``<dump_folder>/adapter``, in PEFT's layout. Collective.

    Args:
        trainer: With a ``[lora]`` table.

    Returns:
        The directory: ``adapter_model.safetensors`` and ``adapter_config.json``.
    """
    section = trainer.config.lora or LoraSection()
    directory = Path(trainer.config.dump_folder) / "adapter"
    with heartbeat.phase("checkpoint"):
        export_peft(
            AdapterStream(trainer.policy, assembly.state_dict_adapter(trainer)),
            directory=directory,
            section=section,
            base_model=trainer.config.hf_assets_path,
        )
    return directory


def export(trainer: Any) -> Path:
    """Export the policy to ``<dump_folder>/export``. Collective.

    Args:
        trainer: An RL or supervised trainer whose ``hf_config`` was made before it was built.

    Returns:
        The directory: weights, ``config.json``, tokenizer and generation config.
    """
    model = ShardedModel.of_trainer(trainer)
    directory = Path(trainer.config.dump_folder) / "export"
    with heartbeat.phase("checkpoint"):
        export_hf(
            WeightStream(model, assembly.state_dict_adapter(trainer)),
            directory=directory,
            hf_config=trainer.hf_config,
            assets=trainer.config.hf_assets_path,
            is_tied=is_tied(model),
        )
    return directory
