"""What ``[lora]`` contradicts in other tables of an RL run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from titan_rl.errors import ConfigError
from titan_rl.generation.vllm import VllmGenerator

if TYPE_CHECKING:
    from titan_rl.algorithms.interfaces import Needs
    from titan_rl.titan.lora import LoraSection
    from titan_rl.trainers.rl import RLTrainer

_LARGEST_RANK = 512
_DEGREES = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree")


def check_lora(config: RLTrainer.Config, needs: Needs) -> None:
    """Refuse what adapters were not built for.

    Args:
        config: The whole configuration.
        needs: What its algorithm needs.

    Raises:
        ConfigError: the first contradiction.
    """
    if config.lora is None:
        return
    for error in (*_layouts(config), *_models(config, needs), *_pushes(config, config.lora)):
        raise error


def refuse_lora(config: RLTrainer.Config, purpose: str) -> None:
    """Refuse a run with adapters, which a tool would take for a run without.

    Args:
        config: The whole configuration.
        purpose: What it cannot be, and why.

    Raises:
        ConfigError: it has a ``[lora]`` table.
    """
    if config.lora is not None:
        raise ConfigError(
            "[lora]", f"be left out to be {purpose}", "a table", "Leave it out; the algorithm is the same."
        )


def _layouts(config: RLTrainer.Config) -> Iterator[ConfigError]:
    for name in _DEGREES:
        degree = getattr(config.parallelism, name)
        if degree > 1:
            yield ConfigError(
                f"parallelism.{name}",
                "be 1 with [lora], whose adapters are sharded over data-parallel ranks alone",
                degree,
                "Set 1; data_parallel_shard_degree takes all ranks.",
            )


def _pushes(config: RLTrainer.Config, lora: LoraSection) -> Iterator[ConfigError]:
    if lora.push == "merged":
        return
    if not isinstance(config.generator, VllmGenerator.Config):
        yield ConfigError(
            "lora.push",
            'be "merged" with another generator than vLLM, which alone adds adapters itself',
            lora.push,
            'Set lora.push = "merged", or generator.type = "vllm".',
        )
    elif config.generator.tensor_parallel_degree > 1:
        yield ConfigError(
            "generator.tensor_parallel_degree",
            'be 1 with lora.push = "adapter", whose parts on several ranks were never compared',
            config.generator.tensor_parallel_degree,
            'Set lora.push = "merged".',
        )
    if lora.rank > _LARGEST_RANK:
        yield ConfigError(
            "lora.rank",
            f'be at most {_LARGEST_RANK}, the largest of vLLM, with lora.push = "adapter"',
            lora.rank,
            'Set lora.push = "merged".',
        )


def _models(config: RLTrainer.Config, needs: Needs) -> Iterator[ConfigError]:
    if config.reference.offload_to_cpu:
        yield ConfigError(
            "reference.offload_to_cpu",
            "be false with [lora], where the reference is the policy without its adapters",
            True,
            "Remove it: there is no second copy of the weights.",
        )
    if needs.critic:
        yield ConfigError(
            "[lora]",
            "be left out with an advantage that needs a critic, which would have to train all its weights",
            "a table",
            'Choose an advantage without one, such as "group_normalized", or train all weights.',
        )
    if config.reward_model is not None:
        yield ConfigError(
            "[lora]",
            "be left out with [reward_model], whose model is built like the policy",
            "a table",
            "Score with [[reward]] tables, or train all weights.",
        )
