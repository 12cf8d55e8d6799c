"""The summary at the end of a run: ``summary.json`` and the text that is printed."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titan_rl.observability.progress import duration

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunSummary:
    """What a run did.

    Attributes:
        steps: Optimiser steps done by the whole run, earlier starts included.
        policy_version: Optimiser updates that were applied.
        score_before: Held-out score before the first step, if evaluated.
        score_after: Held-out score after the last step, if evaluated.
        scores: Held-out score by step.
        num_evaluated: Held-out prompts of one evaluation.
        seconds: Wall-clock seconds of this start, from the first push to the last evaluation.
        stage_seconds: Seconds of this start by stage.
        stage_tokens: Tokens of this start by stage, over all ranks.
        paths: Where everything lies.
    """

    steps: int = 0
    policy_version: int = 0
    score_before: float | None = None
    score_after: float | None = None
    scores: dict[int, float] = field(default_factory=dict)
    num_evaluated: int = 0
    seconds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    stage_tokens: dict[str, int] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        write_json(path, asdict(self))

    def text(self) -> str:
        """Format for a person."""
        lines = [f"Done: {self.steps} steps in {duration(self.seconds)}."]
        if self.score_before is not None and self.score_after is not None:
            lines.append(
                f"Held-out score on {self.num_evaluated} prompts: "
                f"{self.score_before:.3f} before, {self.score_after:.3f} after."
            )
        elif self.score_after is not None:
            lines.append(f"Held-out score on {self.num_evaluated} prompts: {self.score_after:.3f} after.")
        lines += [_stage_line(name, s, self.stage_tokens.get(name)) for name, s in self.stage_seconds.items()]
        lines += [f"  {name + ':':<12} {path}" for name, path in self.paths.items()]
        return "\n".join(lines)


def _stage_line(name: str, seconds: float, tokens: int | None) -> str:
    rate = f", {tokens / seconds:,.0f} tokens/s" if tokens and seconds > 0 else ""
    return f"  {name + ':':<12} {seconds:.1f} s{rate}"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_json(path: Path) -> Mapping[str, Any]:
    """What an earlier start left in a file, a JSON object; empty if there is none.

    One that is broken is as good as none, and named in a warning: a machine that fails may leave a file that
    was just written empty or cut off.

    Args:
        path: The file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read and is taken as absent: %s.", path, error)
        return {}
    if not isinstance(content, dict):
        logger.warning("%s does not hold a JSON object and is taken as absent.", path)
        return {}
    return content


def steps_in(content: Mapping[str, Any], key: str) -> dict[int, Any]:
    """What an earlier start measured by step; empty if there is nothing that can be read.

    Args:
        content: From :func:`read_json`.
        key: Of the object in it that has steps for keys.
    """
    try:
        return {int(step): value for step, value in content.get(key, {}).items()}
    except (AttributeError, ValueError):
        logger.warning("%s of an earlier start has no steps for keys and is taken as absent.", key)
        return {}
