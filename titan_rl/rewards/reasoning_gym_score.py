"""The score that a reasoning-gym task gives to an answer."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from titan_rl.errors import ConfigError, RewardError
from titan_rl.types import Rollout


class ReasoningGymScore:
    """``score_answer`` of the task that made the prompt, in [0, 1].

    The prompt's metadata (``data.source.type = "reasoning_gym"``) names the task, its seed and its index; the
    task is made again in the reward worker, because some of its entries do not survive JSON.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Options of the ``reasoning_gym`` reward."""

        answer_pattern: str = ""
        """Regular expression whose group 1 is the answer inside the completion, for example
        ``"<answer>(.*?)</answer>"``; its last match counts. Empty: the whole completion, stripped."""

    def __init__(self, config: Config) -> None:
        """Find the package and compile the pattern.

        Raises:
            ConfigError: reasoning-gym is not installed, or the pattern is not one with a group.
        """
        try:
            self._gym: ModuleType = importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise ConfigError(
                'reward.type "reasoning_gym"',
                "find the package reasoning-gym",
                str(error),
                "Run `pip install 'titan_rl[tasks]'`.",
            ) from error
        try:
            self._pattern = re.compile(config.answer_pattern, re.DOTALL) if config.answer_pattern else None
        except re.error as error:
            raise ConfigError("reward.answer_pattern", "be a regular expression", str(error), "") from error
        if self._pattern is not None and self._pattern.groups < 1:
            raise ConfigError(
                "reward.answer_pattern", "have a group around the answer", config.answer_pattern, "Add ()."
            )
        self._datasets: dict[str, Any] = {}

    def __call__(self, rollout: Rollout) -> float:
        """Score the answer; 0 when the pattern finds none.

        Raises:
            RewardError: the prompt was not made by reasoning-gym, or the task made another question.
        """
        made: Any = rollout.prompt.metadata.get("reasoning_gym")
        if not isinstance(made, dict):
            raise RewardError(f"Prompt {rollout.prompt.id} must come from data.source.type = reasoning_gym.")
        entry = self._dataset(made)[made["index"]]
        if entry["question"] != rollout.prompt.messages[-1].content:
            raise RewardError(f"Task {made['task']} must make the question of {rollout.prompt.id} again.")
        answer: str | None = rollout.text.strip()
        if self._pattern is not None:
            found = self._pattern.findall(rollout.text)
            last = found[-1] if found else None
            answer = last[0] if isinstance(last, tuple) else last
        if answer is None:
            return 0.0
        return float(self._dataset(made).score_answer(answer.strip(), entry))

    def _dataset(self, made: dict[str, Any]) -> Any:
        key = json.dumps([made["task"], made["seed"], made["size"], made["params"]], sort_keys=True)
        if key not in self._datasets:
            self._datasets[key] = self._gym.create_dataset(
                made["task"], seed=made["seed"], size=made["size"], **made["params"]
            )
        return self._datasets[key]
