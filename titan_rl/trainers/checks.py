"""Contradictions between sections of a configuration, found before any process group exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.algorithms.preset import check_composition, derive_needs
from titan_rl.algorithms.registries import ADVANTAGES, LOSSES, SURROGATES
from titan_rl.config.choice import Choice, build
from titan_rl.data.chat import has_same_vocabulary
from titan_rl.errors import ConfigError
from titan_rl.policy.teacher import check_teacher, teacher_spec
from titan_rl.rewards.spec import RewardSpec, check_specs
from titan_rl.titan.architecture import architecture_of
from titan_rl.trainers.layout import Degrees
from titan_rl.trainers.layout_checks import (
    check_heads,
    check_pipeline,
    check_vocabulary,
    contradictions,
)
from titan_rl.trainers.lora_checks import check_lora
from titan_rl.trainers.row_shape import shares_prompts

if TYPE_CHECKING:
    from titan_rl.algorithms.interfaces import Needs
    from titan_rl.algorithms.loss import Loss
    from titan_rl.trainers.rl import RLTrainer
    from titan_rl.trainers.supervised import SupervisedTrainer


_NEEDS_ACCELERATOR = (
    "reference.offload_to_cpu",
    "teacher.offload_to_cpu",
    "training.enable_cpu_offload",
    "training.gc_debug",
    "profiler.enable_memory_snapshot",
)


def check_config(config: RLTrainer.Config, *, world_size: int, device_type: str) -> None:
    """Refuse an RL configuration that cannot do what it says.

    Args:
        config: The whole configuration.
        world_size: Number of ranks of the run.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: the first contradiction found, naming both keys.
    """
    degree = getattr(config.generator, "tensor_parallel_degree", 1)
    check_layout(config, world_size=world_size, generator_degree=degree)
    for check in _checks(config, device_type):
        check()


def find_contradictions(config: RLTrainer.Config, *, device_type: str) -> list[ConfigError]:
    """Everything that :func:`check_config` would refuse, but for the layout, which a plan checks by itself.

    Args:
        config: The whole configuration.
        device_type: ``cpu`` or ``cuda``, of the run.
    """
    found = []
    for check in _checks(config, device_type):
        try:
            check()
        except ConfigError as error:
            found.append(error)
    return found


def _checks(config: RLTrainer.Config, device_type: str) -> list[Callable[[], None]]:
    return [
        lambda: _check_rewards(config),
        lambda: _check_steps(config),
        lambda: _check_lengths(config),
        lambda: _check_sampling(config),
        lambda: check_saving(config),
        lambda: check_device(config, device_type),
        lambda: _check_algorithm(config),
        lambda: _check_critic_warmup(config),
        lambda: _check_reward_model(config),
        lambda: _check_shaping(config),
        lambda: _check_batching(config),
        lambda: _check_watchdog(config),
    ]


def _check_rewards(config: RLTrainer.Config) -> None:
    specs = [RewardSpec.from_table(table) for table in config.reward]
    if not specs and config.reward_model is None:
        raise ConfigError("[[reward]]", "stand in the configuration at least once", 0, "Add one reward.")
    check_specs(specs)


def _check_algorithm(config: RLTrainer.Config) -> None:
    loss = config.loss.build()
    _check_on_policy(config, loss)
    needs = derive_needs(build(config.advantage), loss, steps_per_iteration=1)
    _check_needs(config, needs)
    check_lora(config, needs)
    spec: Any = config.model_spec
    check_teacher(
        config.teacher,
        coefficient=config.loss.distillation.coefficient,
        model=config.model,
        vocab_size=spec.model.vocab_size,
        parallelism=config.parallelism,
    )
    _check_layout_of_teacher(config)
    check_composition(
        needs,
        group_size=config.sampling.group_size,
        advantage_type=Choice(ADVANTAGES).name_of(config.advantage),
    )


def _check_layout_of_teacher(config: RLTrainer.Config) -> None:
    """The policy's layout was checked; an architecture of its own has other heads and layers."""
    if config.teacher is None:
        return
    spec: Any = teacher_spec(config.teacher, config.model)
    parallelism, architecture = config.parallelism, architecture_of(spec.model)
    rows = config.training.local_batch_size
    for error in (
        *check_heads(parallelism, architecture),
        *check_vocabulary(parallelism, architecture),
        *check_pipeline(parallelism, architecture, local_batch_size=rows),
    ):
        constraint = error.constraint.replace("[model]", "[teacher]")
        raise ConfigError(error.where, constraint, error.got, error.remedy)


def check_supervised_config(config: SupervisedTrainer.Config, *, world_size: int, device_type: str) -> None:
    """Refuse a supervised configuration that cannot do what it says.

    Args:
        config: The whole configuration.
        world_size: Number of ranks of the run.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: the first contradiction found.
    """
    training, parallelism = config.training, config.parallelism
    check_layout(config, world_size=world_size)
    check_saving(config)
    check_device(config, device_type)
    rows = training.local_batch_size * data_parallel_degree(parallelism, world_size)
    if training.global_batch_size > 0 and training.global_batch_size % rows:
        raise ConfigError(
            "training.global_batch_size",
            f"be a multiple of {rows} = training.local_batch_size x data-parallel ranks",
            training.global_batch_size,
            f"Set {-(-training.global_batch_size // rows) * rows}, or leave it out for {rows}.",
        )


def check_layout(config: Any, *, world_size: int, generator_degree: int = 1) -> None:
    """Refuse a parallel layout that does not fit the ranks, the model, the rows or the generator.

    Args:
        config: With TorchTitan's sections and ``model_spec``.
        world_size: Number of ranks of the run.
        generator_degree: ``generator.tensor_parallel_degree``.

    Raises:
        ConfigError: the first contradiction, with the nearest layout that works.
    """
    parallelism = config.parallelism
    for error in contradictions(
        parallelism,
        architecture=architecture_of(config.model_spec.model),
        world_size=world_size,
        seq_len=config.training.seq_len,
        local_batch_size=config.training.local_batch_size,
        generator_degree=generator_degree,
        has_cuda_graphs=not config.training.disable_cuda_graphs,
    ):
        raise error


def data_parallel_degree(parallelism: Any, world_size: int) -> int:
    """Ranks that train on rows of their own."""
    return Degrees.of(parallelism, world_size).data_parallel


def _check_steps(config: RLTrainer.Config) -> None:
    if config.training.global_batch_size != -1:
        raise ConfigError(
            "training.global_batch_size",
            "not be set in RL, where the batch is what the prompts of an iteration make",
            config.training.global_batch_size,
            "Set data.prompts_per_iteration and sampling.group_size.",
        )
    per_iteration = config.algorithm.steps_per_iteration
    for key, value in (
        ("training.steps", config.training.steps),
        ("checkpoint.interval", config.checkpoint.interval if config.checkpoint.enable else per_iteration),
        ("evaluation.interval_steps", config.evaluation.interval_steps),
    ):
        if value % per_iteration:
            raise ConfigError(
                key,
                f"be a multiple of algorithm.steps_per_iteration = {per_iteration}",
                value,
                "Optimiser steps are counted, and an iteration is never cut in two.",
            )
    if per_iteration > config.data.prompts_per_iteration:
        raise ConfigError(
            "algorithm.steps_per_iteration",
            f"be at most data.prompts_per_iteration = {config.data.prompts_per_iteration}",
            per_iteration,
            "Each step trains on whole groups.",
        )


def _check_on_policy(config: RLTrainer.Config, loss: Loss) -> None:
    if loss.is_on_policy_only and config.algorithm.steps_per_iteration > 1:
        table: Any = config.loss
        is_composed = isinstance(table, PolicyLoss.Config)
        key = "loss.surrogate.type" if is_composed else "loss.type"
        name = Choice(SURROGATES).name_of(table.surrogate) if is_composed else Choice(LOSSES).name_of(table)
        raise ConfigError(
            "algorithm.steps_per_iteration",
            f'be 1 with {key} = "{name}", which is wrong once the weights have moved',
            config.algorithm.steps_per_iteration,
            'Set loss.surrogate.type = "clipped" or "clipped_weight", which weight by the ratio.',
        )


def _check_lengths(config: RLTrainer.Config) -> None:
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    if longest > config.training.seq_len:
        raise ConfigError(
            "training.seq_len",
            f"hold a whole sample: data.max_prompt_tokens + sampling.max_tokens = {longest}",
            config.training.seq_len,
            f"Set training.seq_len = {longest} or more, or lower the other two.",
        )


def _check_sampling(config: RLTrainer.Config) -> None:
    sampling = config.sampling
    for key, value, off in (
        ("top_p", sampling.top_p, 1.0),
        ("top_k", sampling.top_k, 0),
        ("min_p", sampling.min_p, 0.0),
    ):
        if value != off:
            raise ConfigError(
                f"sampling.{key}",
                f"be {off} in training: the trainer scores the whole distribution, the generator would not",
                value,
                "Lower sampling.temperature instead, which both sides apply.",
            )
    evaluation = config.evaluation
    if evaluation.samples_per_prompt > 1 and evaluation.temperature == 0:
        raise ConfigError(
            "evaluation.samples_per_prompt",
            "be 1 with evaluation.temperature = 0, where all samples are equal",
            evaluation.samples_per_prompt,
            "Set evaluation.temperature above 0 for pass@k.",
        )


def _check_needs(config: RLTrainer.Config, needs: Needs) -> None:
    """Refuse tables of models that nothing asks for."""
    advantage = Choice(ADVANTAGES).name_of(config.advantage)
    if config.critic is not None and not needs.critic:
        raise ConfigError(
            "[critic]",
            f'be left out with advantage.type = "{advantage}", which needs no critic',
            "a table",
            'Remove it, or choose an advantage.type that needs one, such as "gae".',
        )
    reference = config.reference.offload_to_cpu and not needs.reference
    if reference:
        raise ConfigError(
            "reference.offload_to_cpu",
            "be left out with loss.kl.coefficient = 0, which needs no reference",
            True,
            "Remove it, or set loss.kl.coefficient.",
        )


def _check_critic_warmup(config: RLTrainer.Config) -> None:
    iterations = config.training.steps // config.algorithm.steps_per_iteration
    warmup = 0 if config.critic is None else config.critic.warmup_iterations
    if warmup != "all" and warmup >= iterations:
        raise ConfigError(
            "critic.warmup_iterations",
            f"be below the {iterations} iterations of training.steps = {config.training.steps}, or the "
            "policy is never trained",
            warmup,
            'Lower it, or set "all" to train a critic beside a frozen policy on purpose.',
        )


def _check_reward_model(config: RLTrainer.Config) -> None:
    """An export brings its tokenizer. A checkpoint has none, and the policy's architecture."""
    if config.reward_model is not None:
        has_same_vocabulary(
            config.reward_model.path,
            config.model.hf_assets_path,
            where="reward_model.path",
            why="the reward model reads the policy's tokens",
        )


def _check_shaping(config: RLTrainer.Config) -> None:
    buffer = config.shaping.overlong_buffer_tokens
    if buffer > config.sampling.max_tokens:
        raise ConfigError(
            "shaping.overlong_buffer_tokens",
            f"be at most sampling.max_tokens = {config.sampling.max_tokens}, before which it begins",
            buffer,
            "A fifth of sampling.max_tokens is usual.",
        )
    if config.refill.max_rounds and config.sampling.group_size == 1:
        raise ConfigError(
            "refill.max_rounds",
            "be 0 with sampling.group_size = 1, where the rewards of a group can never differ",
            config.refill.max_rounds,
            "Set sampling.group_size = 8, or refill.max_rounds = 0.",
        )


def _check_batching(config: RLTrainer.Config) -> None:
    if config.batching.share_prompts == "on":
        shares_prompts(config)  # raises


def _check_watchdog(config: RLTrainer.Config) -> None:
    section, longest = config.resilience.watchdog, 2 * config.sampling.timeout_seconds
    if section is not None and 0 < section.collective_seconds <= longest:
        raise ConfigError(
            "resilience.watchdog.collective_seconds",
            f"be more than 2 x sampling.timeout_seconds = {longest:g}, for which a rank may wait for the "
            "rollouts and rewards of another",
            section.collective_seconds,
            "Raise it, or lower sampling.timeout_seconds.",
        )


def check_saving(config: Any) -> None:
    """Refuse what needs checkpoints where there are none.

    Args:
        config: With TorchTitan's sections.

    Raises:
        ConfigError: ``checkpoint.load_step`` or ``resilience.bad_step = "roll_back"`` without
            ``checkpoint.enable``.
    """
    section = config.checkpoint
    if not section.enable and config.resilience.bad_step == "roll_back":
        raise ConfigError(
            "resilience.bad_step",
            'be "skip" or "abort" with checkpoint.enable = false, where there is nothing to go back to',
            "roll_back",
            "Set checkpoint.enable = true.",
        )
    if not section.enable and section.load_step != -1:
        raise ConfigError(
            "checkpoint.load_step",
            "be left out with checkpoint.enable = false, which neither saves nor loads",
            section.load_step,
            "Set checkpoint.enable = true, or remove it.",
        )


def check_device(config: Any, device_type: str) -> None:
    """Refuse what a CPU cannot do, of whichever trainer.

    Args:
        config: With TorchTitan's sections.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: the first key that needs an accelerator.
    """
    if device_type != "cpu":
        return
    for key in _NEEDS_ACCELERATOR:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        if value:
            raise ConfigError(key, "be false on a CPU, where it needs an accelerator", value, "Remove it.")
    if getattr(config.checkpoint, "async_mode", "disabled") == "async_with_pinned_mem":
        raise ConfigError(
            "checkpoint.async_mode",
            'be "disabled" or "async" on a CPU, which has no pinned memory',
            "async_with_pinned_mem",
            'Set checkpoint.async_mode = "async".',
        )
