"""Contradictions in the configuration of a preference or reward-model run, found before any process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_rl.errors import ConfigError
from titan_rl.trainers.checks import check_device, check_layout, check_saving

if TYPE_CHECKING:
    from titan_rl.trainers.pair_trainer import PairTrainer


def check_pair_config(config: PairTrainer.Config, *, world_size: int, device_type: str) -> None:
    """Refuse a configuration that cannot do what it says.

    Args:
        config: The whole configuration.
        world_size: Number of ranks of the run.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: the first contradiction found.
    """
    check_layout(config, world_size=world_size)
    if config.training.global_batch_size != -1:
        raise ConfigError(
            "training.global_batch_size",
            "not be set here, where a step is a number of preferences",
            config.training.global_batch_size,
            "Set data.preferences_per_step.",
        )
    if config.validator.enable:
        raise ConfigError("validator.enable", "be false here", True, "Set [evaluation] instead.")
    check_saving(config)
    check_device(config, device_type)
