"""``titan-rl validate``: the checks of a start without a process group, and what the numbers amount to."""

from __future__ import annotations

from typing import Any

from titan_rl.config.choice import build, owner_of
from titan_rl.trainers import assembly, checks, pair_checks
from titan_rl.trainers.batch_arithmetic import batch_plan
from titan_rl.trainers.layout import Degrees

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
    training = config.training
    plan = batch_plan(
        Degrees.of(config.parallelism, world_size),
        world_size=world_size,
        generator_degree=getattr(config.generator, "tensor_parallel_degree", 1),
        prompts=config.data.prompts_per_iteration,
        group_size=config.sampling.group_size,
        steps=training.steps,
        steps_per_iteration=config.algorithm.steps_per_iteration,
        seq_len=training.seq_len,
        sample_tokens=config.data.max_prompt_tokens + config.sampling.max_tokens,
        rows=training.local_batch_size,
    )
    degree = world_size // plan.generators
    return {
        "iterations": plan.iterations,
        "prompts": f"{plan.prompts} per iteration",
        "samples": f"{plan.samples} per iteration, {config.sampling.group_size} per prompt",
        "optimiser steps": f"{plan.steps}, {plan.steps_per_iteration} per iteration",
        "generators": f"{plan.generators} of {degree} rank(s), at most {plan.prompts_per_generator} prompts "
        "each",
        "data-parallel ranks": f"{plan.data_ranks}, at most {plan.samples_per_rank} samples each per step",
        "rows": f"at most {plan.rows_per_rank} of {plan.tokens_per_row} tokens per data-parallel rank "
        "and step",
        "micro-batches": f"at most {plan.micro_batches_per_rank} per data-parallel rank and step, of "
        f"{training.local_batch_size} row(s)",
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
