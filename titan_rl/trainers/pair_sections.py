"""The tables of preference and reward-model runs that belong to no single component."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from titan_rl.config.choice import Choice
from titan_rl.data.arithmetic_preferences import ArithmeticPreferences
from titan_rl.data.preferences import PREFERENCES


@dataclass(kw_only=True, slots=True)
class PairDataSection:
    """Table ``[data]`` of a preference or reward-model run."""

    source: Annotated[object, Choice(PREFERENCES)] = field(default_factory=ArithmeticPreferences.Config)
    """Where preferences come from: table ``[data.source]`` with ``type``."""

    preferences_per_step: Annotated[int, Ge(1)] = 32
    """Preferences of one optimiser step over all ranks: pairs, or completions labelled one by one."""

    system_prompt: str = ""
    """Put before every prompt as a system message; empty: none."""

    chat_template: Literal["auto", "on", "off"] = "auto"
    """Render with the tokenizer's chat template: if it has one, always, or never."""

    too_long: Literal["error", "skip"] = "error"
    """A preference that does not fit into a micro-batch ends the run at start-up, or is left out and
    counted."""

    shuffle: bool = True
    """Draw each epoch in an order that depends on the seed and the epoch only."""


@dataclass(kw_only=True, slots=True)
class PairEvaluationSection:
    """Table ``[evaluation]``: held-out preferences, before the first step, every so often, and last."""

    interval_steps: Annotated[int, Ge(0)] = 0
    """Evaluate when the optimiser step is a multiple of this; 0: only before the first and after the last."""

    num_preferences: Annotated[int, Ge(1)] = 200
    """Held-out preferences, the first ones of the held-out split; fewer if it is smaller."""

    minimum_gain: float | None = None
    """The run fails unless the held-out accuracy rose by at least this from first to last."""


@dataclass(kw_only=True, slots=True)
class PairReferenceSection:
    """Table ``[reference]``: the policy as it was before the first step, scored once."""

    cache_folder: str = ""
    """Where the reference's log-probabilities are kept; empty: ``<dump_folder>/reference``. Runs with equal
    initial weights can share a folder: each completion is scored once."""
