"""What decides the rest of a run beyond model, optimiser and schedule, as tensors in the checkpoint."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import torch

from titan_rl.errors import ConfigError
from titan_rl.resilience.seeds import derive_seed

_MASK = 2**63 - 1


class RunState:
    """Counters of the run, saved and restored by TorchTitan's checkpointer.

    Random numbers need no state of their own: every request has a derived seed, and the process-wide
    generators are re-seeded from ``(run seed, iteration, rank)`` at the start of every iteration.

    Attributes:
        iteration: Iterations committed.
        cursor: Prompts drawn so far, over all ranks.
        policy_version: Optimiser updates applied.
        skipped_steps: Steps that changed nothing (no trained token, or a non-finite gradient).
        dropped_samples: Rollouts whose reward failed.
        dropped_groups: Groups that were generated and not trained on, because they teach nothing or too few
            of their rewards succeeded.
        is_evaluation_left: 1 if the held-out score of this step is still to be measured, because the run was
            asked to stop; otherwise 0.
        mean_mismatch: Mean difference of generator and trainer in the last iteration, nats per token;
            infinite before it is measured. It decides where the next old log-probabilities come from.
        kl_coefficient: Where the controller of the KL penalty has brought it; NaN before it has
            moved it.
    """

    FIELDS = (
        "iteration",
        "cursor",
        "policy_version",
        "skipped_steps",
        "dropped_samples",
        "dropped_groups",
        "is_evaluation_left",
    )
    MEASURED = ("mean_mismatch", "kl_coefficient")

    def __init__(self, *, seed: int, data_fingerprint: str) -> None:
        """Start at zero.

        Args:
            seed: The run seed (``debug.seed``).
            data_fingerprint: Names the contents of the training prompts.
        """
        self.iteration = self.cursor = self.policy_version = 0
        self.skipped_steps = self.dropped_samples = self.dropped_groups = self.is_evaluation_left = 0
        self.mean_mismatch, self.kl_coefficient = math.inf, math.nan
        self.seed = seed
        self._data = derive_seed("data", data_fingerprint)

    def state_dict(self) -> dict[str, Any]:
        """Counters as int64 tensors, what was measured as float64."""
        state = {name: torch.tensor(value, dtype=torch.int64) for name, value in self.numbers().items()}
        return state | {n: torch.tensor(getattr(self, n), dtype=torch.float64) for n in self.MEASURED}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counters.

        Raises:
            ConfigError: the checkpoint was made with another seed or other prompts.
        """
        stored = {name: value.item() for name, value in state_dict.items()}
        self.check(stored)
        for name in (*self.FIELDS, *self.MEASURED):
            setattr(self, name, stored[name])

    def numbers(self) -> dict[str, int]:
        """Counters, and what a resume compares, for the manifest of a checkpoint."""
        counters = {name: getattr(self, name) for name in self.FIELDS}
        return counters | {"seed": self.seed & _MASK, "data": self._data}

    def check(self, stored: Mapping[str, float]) -> None:
        """Refuse a checkpoint that this run cannot be continued from.

        Args:
            stored: From :meth:`numbers` of the run that wrote it.

        Raises:
            ConfigError: it was made with another seed or other prompts.
        """
        if stored["seed"] != self.seed & _MASK:
            raise ConfigError(
                "debug.seed",
                f"stay {stored['seed']} when a run is resumed, because it decides which prompts are drawn",
                self.seed,
                "Restore it, or choose another dump_folder for a new run.",
            )
        if stored["data"] != self._data:
            raise ConfigError(
                "data.source",
                "stay the same when a run is resumed, because the cursor counts its prompts",
                "other prompts",
                "Restore it, or choose another dump_folder for a new run.",
            )


def seed_process(run_seed: int, iteration: int, rank: int) -> None:
    """Seed Python's and torch's process-wide generators for one iteration of one rank."""
    seed = derive_seed(run_seed, "process", iteration, rank)
    random.seed(seed)
    torch.manual_seed(seed)
