"""Configurations by name: ``torchrun -m torchtitan.train --module titan_rl --config NAME``.

TorchTitan calls the function of that name and overlays the command line (``--training.steps 5``). Each
shipped recipe has one. The model is chosen here, before the command line is read.
"""

from __future__ import annotations

import importlib
from importlib import resources
from typing import Any


def grpo_debugmodel() -> Any:
    """TorchTitan's small Qwen3 learns, from random weights, to write letters and digits: a quick trial."""
    table = {
        "dump_folder": "outputs/grpo_debugmodel",
        "model": {
            "name": "qwen3",
            "flavor": "debugmodel",
            "hf_assets_path": str(resources.files("titan_rl") / "assets" / "tiny_llama"),
            "allow_random_init": True,
            "export": False,
        },
        "data": {"prompts_per_iteration": 4, "max_prompt_tokens": 32},
        "reward": [{"type": "format", "pattern": r"(?s).*\w.*"}],
        "sampling": {"group_size": 4, "max_tokens": 8},
        "generator": {"type": "local"},
        "training": {"steps": 10, "seq_len": 256},
        "optimizer": {"lr": 3e-4},
        "activation_checkpoint": {"type": "none"},
        "evaluation": {"num_prompts": 8},
    }
    return _named().from_table(table, name="grpo_debugmodel")


def smollm2_135m_arithmetic_grpo() -> Any:
    """``train_configs/smollm2_135m_arithmetic_grpo.toml``."""
    return _named().from_recipe("smollm2_135m_arithmetic_grpo")


def tiny_pretrain() -> Any:
    """``train_configs/tiny_pretrain.toml``."""
    return _named().from_recipe("tiny_pretrain")


def tiny_sft() -> Any:
    """``train_configs/tiny_sft.toml``."""
    return _named().from_recipe("tiny_sft")


def tiny_distillation() -> Any:
    """``train_configs/tiny_distillation.toml``."""
    return _named().from_recipe("tiny_distillation")


def tiny_dpo() -> Any:
    """``train_configs/tiny_dpo.toml``."""
    return _named().from_recipe("tiny_dpo")


def tiny_reward_model() -> Any:
    """``train_configs/tiny_reward_model.toml``."""
    return _named().from_recipe("tiny_reward_model")


def tiny_ppo_reward_model() -> Any:
    """``train_configs/tiny_ppo_reward_model.toml``."""
    return _named().from_recipe("tiny_ppo_reward_model")


def tiny_grpo() -> Any:
    """``train_configs/tiny_grpo.toml``."""
    return _named().from_recipe("tiny_grpo")


def tiny_grpo_lora() -> Any:
    """``train_configs/tiny_grpo_lora.toml``."""
    return _named().from_recipe("tiny_grpo_lora")


def qwen3_0_6b_gsm8k_grpo() -> Any:
    """``train_configs/qwen3_0.6b_gsm8k_grpo.toml``."""
    return _named().from_recipe("qwen3_0.6b_gsm8k_grpo")


def qwen3_8b_math_grpo() -> Any:
    """``train_configs/qwen3_8b_math_grpo.toml``."""
    return _named().from_recipe("qwen3_8b_math_grpo")


def _named() -> Any:
    # Imported when a configuration is asked for: TorchTitan takes an ImportError of this module for "there is
    # no such module" and hides its cause.
    return importlib.import_module("titan_rl.trainers.named")
