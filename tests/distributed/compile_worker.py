"""A step of GRPO and of PPO with ``torch.compile`` and one way of checkpointing activations: test_compile.py.

Compiling leaves settings behind that are the whole process's, so each way has a process of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch._dynamo.utils import counters
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

from tests.distributed.algorithms_worker import Setup

NAMES = ("grpo", "ppo")
PLAIN = "plain"
CHECKPOINTING: dict[str, Any] = {
    PLAIN: None,
    "compiled": None,
    "compiled, selective": SelectiveAC.Config(),
    "compiled, full": FullAC.Config(),
    "compiled, memory budget": MemoryBudgetAC.Config(memory_budget=0.0),
}


def run(directory: Path, way: str) -> None:
    """One step of every algorithm, and how much was compiled for it.

    Args:
        directory: Has the model; ``<way>.safetensors`` and ``<way>.json`` are written there.
        way: A key of ``CHECKPOINTING``.
    """
    setup = Setup(
        directory,
        activation_checkpoint=CHECKPOINTING[way],
        compile=CompileConfig(enable=way != PLAIN, backend="inductor"),
    )
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, Any] = {"budget": torch._functorch.config.activation_memory_budget}
    for name in NAMES:
        step = setup.step(name, setup.batch(name, "packed"))
        tensors |= {f"{name}/{key}": value.contiguous() for key, value in step.gradients.items()}
        rest[name] = {"loss": step.loss, "metrics": step.metrics, "sizes": step.sizes}
    names = [name for name, _ in setup.rank.module.named_parameters()]
    rest["num_wrapped"] = sum("_checkpoint_wrapped_module" in name for name in names)
    rest["num_graphs"] = counters["stats"]["unique_graphs"]
    save_file(tensors, directory / f"{way}.safetensors")
    (directory / f"{way}.json").write_text(json.dumps(rest))
