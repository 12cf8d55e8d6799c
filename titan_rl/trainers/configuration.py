"""From a checked document to a trainer's configuration: defaults, presets, overlay, and the model spec."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le

from titan_rl.algorithms.registries import ALGORITHMS, LOSSES
from titan_rl.config.choice import Choice
from titan_rl.config.dump import to_table
from titan_rl.config.overlay import overlay
from titan_rl.config.presets import types_in
from titan_rl.config.registry import resolve
from titan_rl.config.rules import As, Hidden, Limits, Rules
from titan_rl.config.toml import Document
from titan_rl.titan.api import (
    CheckpointManager,
    CommConfig,
    LRSchedulersContainer,
    MemoryBudgetAC,
    MetricsProcessor,
    Profiler,
    SelectiveAC,
    Trainer,
    TrainingConfig,
)
from titan_rl.titan.device import choose_device, install
from titan_rl.titan.models import build_spec
from titan_rl.titan.sections import (
    ACTIVATION_CHECKPOINTING,
    OptimizerSection,
    optimizer_from_section,
    section_from_optimizer,
)
from titan_rl.trainers.preference import PreferenceTrainer
from titan_rl.trainers.reward_model import RewardModelTrainer
from titan_rl.trainers.rl import RLTrainer
from titan_rl.trainers.supervised import SupervisedTrainer

TRAINER_CONFIGS = {
    "rl": RLTrainer.Config,
    "supervised": SupervisedTrainer.Config,
    "preference": PreferenceTrainer.Config,
    "reward_model": RewardModelTrainer.Config,
}

_ACTIVATION_CHECKPOINTING = Choice({"none": None, **ACTIVATION_CHECKPOINTING})
RULES: Rules = {
    (Trainer.Config, "model_spec"): Hidden("Set [model] instead."),
    (Trainer.Config, "hf_assets_path"): Hidden("Set model.hf_assets_path instead."),
    (Trainer.Config, "tokenizer"): Hidden("The tokenizer is read from model.hf_assets_path."),
    (Trainer.Config, "dataloader"): Hidden("Set [data] instead."),
    (Trainer.Config, "validator"): Hidden("Set [evaluation] in an RL run instead."),
    (Trainer.Config, "override"): Hidden("Use TorchTitan's own Python configurations for overrides."),
    (RLTrainer.Config, "loss"): Choice(LOSSES),
    (SupervisedTrainer.Config, "loss"): Hidden("Supervised training minimises the cross entropy."),
    (Trainer.Config, "activation_checkpoint"): _ACTIVATION_CHECKPOINTING,
    (Trainer.Config, "optimizer"): As(OptimizerSection, optimizer_from_section, section_from_optimizer),
    (Profiler.Config, "trace_post_processor"): Hidden("A function cannot be written in TOML."),
    (TrainingConfig, "steps"): Limits((Ge(1),)),
    (TrainingConfig, "seq_len"): Limits((Ge(2),)),
    (TrainingConfig, "local_batch_size"): Limits((Ge(1),)),
    (TrainingConfig, "global_batch_size"): Limits((Ge(-1),)),
    (TrainingConfig, "max_norm"): Limits((Gt(0),)),
    (TrainingConfig, "gc_freq"): Limits((Ge(1),)),
    (CheckpointManager.Config, "interval"): Limits((Ge(1),)),
    (CheckpointManager.Config, "keep_latest_k"): Limits((Ge(0),)),
    (CheckpointManager.Config, "load_step"): Limits((Ge(-1),)),
    (MetricsProcessor.Config, "log_freq"): Limits((Ge(1),)),
    (LRSchedulersContainer.Config, "warmup_steps"): Limits((Ge(0),)),
    (LRSchedulersContainer.Config, "total_steps"): Limits((Ge(1),)),
    (LRSchedulersContainer.Config, "decay_ratio"): Limits((Ge(0), Le(1))),
    (LRSchedulersContainer.Config, "min_lr_factor"): Limits((Ge(0), Le(1))),
    (CommConfig, "init_timeout_seconds"): Limits((Ge(1),)),
    (CommConfig, "train_timeout_seconds"): Limits((Ge(1),)),
    (MemoryBudgetAC.Config, "memory_budget"): Limits((Ge(0), Le(1))),
    (Profiler.Config, "profile_freq"): Limits((Ge(1),)),
    (Profiler.Config, "profiler_active"): Limits((Ge(1),)),
    (Profiler.Config, "profiler_warmup"): Limits((Ge(0),)),
    (Profiler.Config, "memory_snapshot_freq"): Limits((Ge(1),)),
    (Profiler.Config, "memory_snapshot_max_entries"): Limits((Ge(1),)),
}


def default_config(trainer: str) -> Any:
    """The configuration that a TOML file overlays: TorchTitan's defaults, with ours where RL needs others.

    Args:
        trainer: A key of ``TRAINER_CONFIGS``.
    """
    config = TRAINER_CONFIGS[trainer]()
    config.optimizer = optimizer_from_section(OptimizerSection())
    config.activation_checkpoint = SelectiveAC.Config()
    config.lr_scheduler.warmup_steps = 0
    config.lr_scheduler.decay_ratio = 0.0
    config.training.steps = 100
    config.training.local_batch_size = 1
    config.training.disable_cuda_graphs = True  # micro-batches vary in shape
    config.metrics.enable_tensorboard = True
    config.metrics.log_freq = 1
    config.debug.seed = 0
    config.debug.enable_structured_logging = False
    config.checkpoint.last_save_model_only = False
    return config


def types_by_algorithm() -> dict[str, dict[str, Any]]:
    """The ``type`` of every table that a named algorithm fills, by its name, as nested tables."""
    default, found = default_config("rl"), {}
    for name in ALGORITHMS:
        sections = resolve(name, ALGORITHMS, "algorithm.type")().sections()
        table = to_table(dataclasses.replace(default, **sections), RULES)
        found[name] = types_in({section: table[section] for section in sections})
    return found


def configure(document: Document, trainer: str, *, device_type: str | None = None) -> Any:
    """Build a trainer's configuration; ``.build()`` on it makes the trainer.

    Prepares TorchTitan for this process's device first.

    Args:
        document: Checked, without its root key ``trainer``.
        trainer: A key of ``TRAINER_CONFIGS``.
        device_type: ``cuda`` or ``cpu``, of the run that is configured; by default this process's.

    Raises:
        ConfigError: values, model or directory do not fit.
    """
    install()
    default = default_config(trainer)
    if trainer == "rl":
        default = _with_preset(default, document)
    if (device_type or choose_device()) == "cpu":
        # bf16 is about ten times slower than fp32 on a CPU without AVX-512 or AMX.
        default.training.mixed_precision_param = "float32"
    table = _with_found_paths(document.table, Path(document.file).parent)
    config = overlay(default, table, rules=RULES, locate=document.locate)
    config.hf_assets_path = config.model.hf_assets_path
    context_parallel = config.parallelism.context_parallel_degree > 1
    lora = getattr(config, "lora", None)
    config.model_spec = build_spec(config.model, context_parallel=context_parallel, lora=lora)
    return config


_PACKAGES = Path(__file__).parents[2]  # of an installed package or a checkout: assets lie below it
_PATHS = (
    ("model", "hf_assets_path"),
    ("checkpoint", "initial_load_path"),
    ("teacher", "hf_assets_path"),
    ("teacher", "initial_load_path"),
    ("critic", "initial_load_path"),
    ("reward_model", "path"),
)


def _with_found_paths(table: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Make paths absolute: relative to the working directory, to the TOML file, or to where titan_rl lies."""
    table = dict(table)
    for section, key in _PATHS:
        value = table.get(section, {}).get(key) if isinstance(table.get(section), dict) else None
        if isinstance(value, str) and value and "://" not in value and value != "none":
            places = (Path(value), directory / value, _PACKAGES / value)
            found = next((place for place in places if place.exists()), Path(value))
            table[section] = {**table[section], key: str(found.resolve())}
    return table


def _with_preset(config: Any, document: Document) -> Any:
    """Put the tables of the named algorithm in place of the defaults."""
    name = document.table.get("algorithm", {}).get("type", config.algorithm.type)
    preset = resolve(name, ALGORITHMS, "algorithm.type")()
    return dataclasses.replace(config, **preset.sections())
