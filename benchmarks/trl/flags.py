"""Fields of TRL's ``GRPOConfig``: what makes the work the same, and what is tried. No TRL here."""

from __future__ import annotations

from typing import Any

VLLM_PATCH = "patched_weight_sync"
"""Not a field: whether :mod:`benchmarks.trl.run_trl` mends TRL's weight sync for a CPU."""

CANDIDATES: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "micro-batches of 16": {"per_device_train_batch_size": 16},
    "continuous batching": {"use_transformers_continuous_batching": True},
}
"""What TRL is tried with when it generates by itself."""

VLLM: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_importance_sampling_correction": False,  # one pass less; what it corrects is 1e-5 nats in fp32
}


def flags_for(spec: dict[str, Any], tried: dict[str, Any]) -> dict[str, Any]:
    """Fields of ``GRPOConfig``: the work as titan_rl does it, and what is tried on top.

    Args:
        spec: From :func:`benchmarks.trl.workloads.read`.
        tried: Over the others; ``per_device_train_batch_size`` is the micro-batch.
    """
    micro_batch = tried.get("per_device_train_batch_size", spec["samples"])
    return {
        "max_steps": spec["steps"],
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": spec["samples"] // micro_batch,
        "num_generations": spec["group_size"],
        "max_completion_length": spec["max_tokens"],
        "temperature": spec["temperature"],
        "learning_rate": spec["lr"],
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "loss_type": "dapo",  # the mean over all tokens of the step
        "beta": 0.0,
        "num_iterations": 1,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
    } | tried
