"""``titan-rl validate``: the checks of a start without a process group, and what the numbers amount to."""

from __future__ import annotations

from typing import Any

from titan_rl.config.choice import build, owner_of
from titan_rl.trainers import assembly, checks, pair_checks

_PAIRS = ("preference", "reward_model")


def check_run(config: Any, trainer: str, *, world_size: int, opens_data: bool) -> None:
    """Make the checks that the trainer makes before it starts.

    Args:
        config: From :func:`titan_rl.trainers.configuration.configure`.
        trainer: The root key ``trainer``.
        world_size: Number of ranks of the run.
        opens_data: Also read the prompts or preferences and encode each once (not in supervised runs).

    Raises:
        ConfigError: the configuration contradicts itself or the files it names.
    """
    device_type = assembly.device_type()
    if trainer == "supervised":
        checks.check_supervised_config(config, world_size=world_size, device_type=device_type)
        return
    if trainer in _PAIRS:
        pair_checks.check_pair_config(config, world_size=world_size, device_type=device_type)
        if opens_data:
            owner: Any = owner_of(type(config))
            owner.open_data(config, build(config.loss), seed=config.debug.seed or 0)
        return
    checks.check_config(config, world_size=world_size, device_type=device_type)
    if opens_data:
        assembly.open_data(config, config.debug.seed or 0)


def describe(config: Any, trainer: str, *, world_size: int) -> list[str]:
    """Say what a configuration amounts to, one number a line.

    Args:
        config: A configuration that passed :func:`check_run`.
        trainer: The root key ``trainer``.
        world_size: Number of ranks of the run.
    """
    counts = {"rl": _rl_numbers, "supervised": _supervised_numbers} | dict.fromkeys(_PAIRS, _pair_numbers)
    numbers = counts[trainer](config, world_size)
    numbers = {"device": f"{assembly.device_type()}, {world_size} rank(s)"} | numbers
    return [f"{name + ':':<22} {value}" for name, value in numbers.items()]


def _rl_numbers(config: Any, world_size: int) -> dict[str, Any]:
    prompts, group_size = config.data.prompts_per_iteration, config.sampling.group_size
    steps, seq_len = config.algorithm.steps_per_iteration, config.training.seq_len
    degree = getattr(config.generator, "tensor_parallel_degree", 1)
    num_generators = world_size // degree
    # A generator group takes every n-th prompt, its ranks share the rollouts, steps share the groups.
    groups = _ceil(_ceil(prompts, num_generators), steps)
    samples = _ceil(groups * group_size, degree)
    # First fit leaves no two rows that would go into one: every row but the last holds this many samples.
    per_row = seq_len // (config.data.max_prompt_tokens + config.sampling.max_tokens)
    rows = _ceil(samples, per_row)
    most = _ceil(prompts, num_generators)
    return {
        "iterations": config.training.steps // steps,
        "prompts": f"{prompts} per iteration",
        "samples": f"{prompts * group_size} per iteration, {group_size} per prompt",
        "optimiser steps": f"{config.training.steps}, {steps} per iteration",
        "generators": f"{num_generators} of {degree} rank(s), at most {most} prompts each",
        "rows": f"at most {rows} of {seq_len} tokens per rank and step",
        "micro-batches": f"at most {_ceil(rows, config.training.local_batch_size)} per rank and step, "
        f"of {config.training.local_batch_size} row(s)",
    }


def _supervised_numbers(config: Any, world_size: int) -> dict[str, Any]:
    training = config.training
    rows = training.global_batch_size
    if rows < 0:
        rows = training.local_batch_size * checks.data_parallel_degree(config.parallelism, world_size)
    return {
        "optimiser steps": training.steps,
        "rows": f"{rows} of {training.seq_len} tokens per step",
        "tokens": f"at most {rows * training.seq_len * training.steps}",
    }


def _pair_numbers(config: Any, world_size: int) -> dict[str, Any]:
    training, preferences = config.training, config.data.preferences_per_step
    share = _ceil(preferences, checks.data_parallel_degree(config.parallelism, world_size))
    return {
        "optimiser steps": training.steps,
        "preferences": f"{preferences} per step, {preferences * training.steps} in all",
        # Each completion is at most one row, and both of a pair are in one micro-batch.
        "rows": f"at most {2 * share} of {training.seq_len} tokens per rank and step",
        "micro-batches": f"at most {share} per rank and step, of {training.local_batch_size} row(s)",
    }


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
