"""TorchTitan data loaders: none for RL, whose data is generated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titan_rl.titan.api import BaseDataLoader


class NoDataLoader(BaseDataLoader):
    """Stands where TorchTitan's trainer expects a data loader; RL takes its batches from rollouts."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No fields."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        """Ignore what TorchTitan tells a data loader (ranks, tokenizer, sizes)."""

    def __iter__(self) -> Iterator[Any]:
        """Yield nothing."""
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save: the prompt cursor is in the run state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore."""
