"""Prompts from the procedural tasks of reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760). Needs the
extra ``tasks``.

The reward that calls the task's own scorer lives in :mod:`titan_rl.rewards`; here is what it needs to do so.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge

from titan_rl.config.registry import suggest
from titan_rl.data.datasets import Split, content_key, fingerprint_prompts, require
from titan_rl.errors import ConfigError
from titan_rl.types import Json, Message, Prompt

_HASH_DEPENDENT = frozenset(
    {
        "intermediate_integration",
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
"""Tasks of reasoning-gym 0.1.25 whose questions follow the order of a Python set, so that they differ between
processes unless PYTHONHASHSEED is set. Found by generating 40 questions of each in several processes."""

_UNSEEDED = frozenset({"codeio", "list_functions"})
"""Tasks that differ between processes whatever is set, found in the same way."""


class ReasoningGym:
    """Questions of one task, each different.

    reasoning-gym derives question i from (seed, i). Indices 0 to ``num_held_out - 1`` are held out and the
    next ``size`` are the train split; a question that came before, in either split, is dropped. So a split
    can be smaller than asked, and a larger ``size`` leaves the held-out split as it is.

    ``metadata["reasoning_gym"]`` holds ``task, seed, size, params, index``: with
    ``d = reasoning_gym.create_dataset(task, seed=seed, size=size, **params)`` the entry is ``d[index]`` and
    the score of a text is ``d.score_answer(text, entry)``. The entry itself is not stored, because some
    scorers compare tuples, which JSON turns into lists.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Which task and how many questions."""

        task: str
        """Name of the task, such as ``"chain_sum"``."""

        size: Annotated[int, Ge(1)] = 10_000
        """Questions generated for the train split."""

        num_held_out: Annotated[int, Ge(0)] = 200
        """Questions generated for the held-out split."""

        seed: Annotated[int, Ge(0)] = 0
        """Seed of the questions. Independent of the run's seed."""

        params: dict[str, Any] = field(default_factory=dict)
        """Parameters of the task, such as ``min_terms``. They must be JSON values."""

    def __init__(self, config: Config, split: Split) -> None:
        """Generate both splits and keep one.

        Raises:
            ConfigError: reasoning-gym is missing, it refuses the task or its parameters, its questions would
                differ between processes, or no question is left.
        """
        self.name = f"reasoning_gym/{config.task}"
        self._config = config
        source = _create(config)
        # Both splits are generated in any case: what one may hold depends on the other.
        seen: set[bytes] = set()
        held_out = _distinct(source, range(config.num_held_out), seen)
        self._entries = held_out
        if split == "train":
            self._entries = _distinct(
                source, range(config.num_held_out, config.num_held_out + config.size), seen
            )
        if split == "train" and not self._entries:
            raise ConfigError(
                "data.source.size",
                "give the train split at least one question that is not held out",
                f"size = {config.size}, num_held_out = {config.num_held_out}",
                "Change the two, or set params that allow more different questions.",
            )
        self.fingerprint = fingerprint_prompts(self[index] for index in range(len(self)))

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int, /) -> Prompt:
        number, question, answer = self._entries[index]
        config = self._config
        recipe: dict[str, Json] = {
            "task": config.task,
            "seed": config.seed,
            "size": config.num_held_out + config.size,
            "params": dict(config.params),
            "index": number,
        }
        return Prompt(
            id=f"reasoning_gym/{config.task}/{config.seed}/{number}",
            messages=(Message("user", question),),
            answer=answer,
            metadata={"reasoning_gym": recipe},
        )


def _create(config: ReasoningGym.Config) -> Any:
    library = require("reasoning_gym", extra="tasks", needed_by="data.source.type 'reasoning_gym'")
    known = require(
        "reasoning_gym.factory", extra="tasks", needed_by="data.source.type 'reasoning_gym'"
    ).DATASETS
    if config.task not in known:
        remedy = suggest(config.task, known, otherwise="The tasks are listed in reasoning-gym's GALLERY.md.")
        raise ConfigError("data.source.task", "be a task of reasoning-gym", config.task, remedy)
    if config.task in _UNSEEDED:
        raise ConfigError(
            "data.source.task",
            "be repeatable",
            f"{config.task}, which draws some questions without the seed",
            "Use another task, or write its questions to a file once.",
        )
    if config.task in _HASH_DEPENDENT and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        raise ConfigError(
            "data.source.task",
            "give every process the same questions",
            f"{config.task}, whose questions depend on Python's hash seed",
            "Start the run with PYTHONHASHSEED=0 in the environment.",
        )
    try:
        json.dumps(config.params, allow_nan=False)
        return library.create_dataset(
            config.task, seed=config.seed, size=config.num_held_out + config.size, **config.params
        )
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        raise ConfigError(
            "data.source.params",
            f"suit the task {config.task} ({type(error).__name__}: {error})",
            repr(config.params),
            "See the task's configuration in reasoning-gym.",
        ) from error


def _distinct(source: Any, indices: range, seen: set[bytes]) -> list[tuple[int, str, str | None]]:
    """Index, question and answer of the questions not seen before; adds them to ``seen``."""
    entries = []
    for index in indices:
        entry = source[index]
        key = content_key([Message("user", entry["question"])])
        if key not in seen:
            seen.add(key)
            answer = entry["answer"]
            entries.append((index, entry["question"], None if answer is None else str(answer)))
    return entries
