"""From ``[[reward]]`` tables to one reward: the specification, its construction, and the weighted sum.

A :class:`RewardSpec` is plain JSON, so that a worker process can build what the parent only describes. How
workers are run is in :mod:`titan_rl.rewards.pool`. No torch here.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from titan_rl.config.registry import alternatives, resolve, suggest
from titan_rl.errors import ConfigError, RewardError
from titan_rl.rewards.registry import REWARDS
from titan_rl.types import Json, Reward, Rollout

RewardFn = Callable[[Rollout], float | Reward]
"""What a reward is once it is built."""


class InvalidRewardError(RewardError):
    """A reward returned something that is no finite number and no valid ``Reward``."""


@dataclass(kw_only=True, slots=True)
class RewardSpec:
    """One ``[[reward]]`` table."""

    type: str
    """A registered name, or ``package.module:Class`` or ``package.module:function`` of your own."""

    weight: float = 1.0
    """Factor of this part in the total. Negative for a penalty, 0 to log a part without training on it."""

    name: str = ""
    """Name of the part in the logs, unique among the rewards. Default: ``type``."""

    params: dict[str, Json] = field(default_factory=dict)
    """The remaining keys of the table: the fields of the reward's own ``Config``."""

    def __post_init__(self) -> None:
        self.name = self.name or self.type
        weight = self.weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(
                self.where("weight"), "be a finite number", weight, "A negative weight makes a penalty."
            )

    @classmethod
    def from_table(cls, table: Mapping[str, Json]) -> RewardSpec:
        """Split a ``[[reward]]`` table into our keys and the reward's own.

        Args:
            table: The table as TOML or JSON gives it.

        Returns:
            The specification. The reward's own keys are checked by :func:`build_reward`.

        Raises:
            ConfigError: ``type`` is missing, or ``type``, ``weight`` or ``name`` has the wrong type.

        >>> RewardSpec.from_table({"type": "format", "weight": 0.1, "pattern": "a+"}).params
        {'pattern': 'a+'}
        """
        own: dict[str, Any] = {key: table[key] for key in ("type", "weight", "name") if key in table}
        for key in ("type", "name"):
            if not isinstance(own.get(key, ""), str) or (key == "type" and not own.get("type")):
                remedy = 'For instance type = "exact_match".'
                raise ConfigError(f"reward.{key}", "be a non-empty string", own.get(key), remedy)
        return cls(**own, params={key: value for key, value in table.items() if key not in own})

    def to_json(self) -> dict[str, Json]:
        """Return the specification as a JSON object; ``RewardSpec(**spec.to_json())`` is its inverse."""
        return dataclasses.asdict(self)

    def where(self, key: str) -> str:
        """Return how errors call a key of this table."""
        return f"{key} of [[reward]] {self.name!r}"


def check_specs(specs: Sequence[RewardSpec]) -> None:
    """Check what can be known without importing any reward.

    Args:
        specs: All ``[[reward]]`` tables of a run.

    Raises:
        ConfigError: Two rewards have the same name.
    """
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            remedy = "Give each of these rewards its own name."
            raise ConfigError("reward.name", "be unique", name, remedy)


def build_reward(spec: RewardSpec) -> RewardFn:
    """Import and construct one reward.

    Args:
        spec: What to build. A class is called with its ``Config``; a function is used as it is.

    Returns:
        A callable from a rollout to a float or a ``Reward``.

    Raises:
        ConfigError: The type does not resolve, a key is unknown or missing, or the constructor raised.
    """
    found = resolve(spec.type, REWARDS, spec.where("type"))
    if inspect.isfunction(found):
        if spec.params:
            remedy = "Write a class with a nested Config to have keys of your own."
            raise ConfigError(
                next(iter(spec.params)), f"not stand in [[reward]] {spec.name!r}", spec.params, remedy
            )
        return found
    config_class = getattr(found, "Config", None)
    if not inspect.isclass(found) or not dataclasses.is_dataclass(config_class):
        constraint = "name a function, or a class with a nested dataclass Config"
        raise ConfigError(spec.where("type"), constraint, spec.type, "docs/rewards.md has an example.")
    construct: Any = found
    try:
        reward = construct(_fill(config_class, spec))
    except ConfigError:
        raise
    except Exception as error:  # a user's constructor can fail in any way; its message is what helps
        got = f"{type(error).__name__}: {error}"
        raise ConfigError(
            spec.where("type"), "be constructed without an error", got, "Correct it."
        ) from error
    if not callable(reward):
        remedy = "Define __call__(self, rollout)."
        raise ConfigError(spec.where("type"), "construct something callable", spec.type, remedy)
    return reward


def _fill(config_class: Any, spec: RewardSpec) -> Any:
    fields = {entry.name: entry for entry in dataclasses.fields(config_class) if entry.init}
    for key in spec.params:
        if key not in fields:
            remedy = suggest(key, fields, otherwise="Remove it.")
            raise ConfigError(f"a key of [[reward]] {spec.name!r}", f"be {alternatives(fields)}", key, remedy)
    for key, entry in fields.items():
        has_default = not (
            entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        )
        if not has_default and key not in spec.params:
            raise ConfigError(spec.where(key), "be set", None, f"Add {key} to that table.")
    hints = typing.get_type_hints(config_class)
    return config_class(
        **{key: _checked(value, hints[key], spec.where(key)) for key, value in spec.params.items()}
    )


def _checked(value: Json, hint: Any, where: str) -> Json:
    """Check a value against a simple annotation; others are for the ``Config`` itself to check."""
    if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
        choices = typing.get_args(hint)
        raise ConfigError(
            where, f"be {alternatives(choices)}", value, suggest(value, choices, otherwise="Pick one.")
        )
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (bool, int, float, str) and type(value) is not hint:
        raise ConfigError(where, f"be of type {hint.__name__}", value, "Correct its type.")
    return value


class WeightedSum:
    r"""All rewards of a run as one.

    .. math:: R(\tau) = \sum_i w_i\, r_i(\tau)

    The parts are recorded unweighted, by name. A reward that returns a ``Reward`` contributes its ``total``
    under its name and its own parts as ``name/part``. When any reward credits turns (``per_turn``), the
    result does too: then a reward that does not is credited to the last turn.
    """

    def __init__(self, specs: Sequence[RewardSpec]) -> None:
        """Build every reward.

        Args:
            specs: With unique names. None: every total is 0, for runs whose rewards come from a model.

        Raises:
            ConfigError: See :func:`check_specs` and :func:`build_reward`.
        """
        check_specs(specs)
        self._terms = [(spec.name, spec.weight, build_reward(spec)) for spec in specs]

    def __call__(self, rollout: Rollout) -> Reward:
        """Score one rollout.

        Args:
            rollout: What to score.

        Returns:
            The weighted total, the unweighted parts, and one value per turn if a reward gave that.

        Raises:
            InvalidRewardError: A reward returned NaN, an infinity, None, a boolean, or anything else that is
                not a number or a ``Reward``. The message names the reward and the value.
            Exception: Whatever a reward raised, with a note that names the reward.
        """
        total, parts, has_turns = 0.0, {}, False
        per_turn = [0.0] * len(rollout.turns)
        for name, weight, reward_fn in self._terms:
            try:
                returned = reward_fn(rollout)
            except BaseException as error:
                error.add_note(f"in reward {name!r}")
                raise
            reward = _as_reward(name, returned, len(rollout.turns))
            total += weight * reward.total
            parts[name] = reward.total
            parts.update({f"{name}/{part}": value for part, value in reward.parts.items()})
            has_turns = has_turns or reward.per_turn is not None
            credits = reward.per_turn or (*[0.0] * (len(per_turn) - 1), reward.total)
            per_turn = [so_far + weight * credit for so_far, credit in zip(per_turn, credits, strict=True)]
        _finite("the weighted sum", total)
        return Reward(total=total, parts=parts, per_turn=tuple(per_turn) if has_turns else None)


def _as_reward(name: str, returned: object, num_turns: int) -> Reward:
    if not isinstance(returned, Reward):
        return Reward(total=_finite(f"reward {name!r}", returned))
    total = _finite(f"total of reward {name!r}", returned.total)
    parts = {part: _finite(f"part {part!r} of reward {name!r}", v) for part, v in returned.parts.items()}
    if returned.per_turn is None:
        return Reward(total=total, parts=parts)
    per_turn = tuple(_finite(f"per_turn of reward {name!r}", value) for value in returned.per_turn)
    if len(per_turn) != num_turns:
        raise InvalidRewardError(
            f"per_turn of reward {name!r} must hold one value for each of {num_turns} turns; "
            f"got {len(per_turn)}. Return per_turn=None to reward the rollout as a whole."
        )
    return Reward(total=total, parts=parts, per_turn=per_turn)


def _finite(where: str, value: object) -> float:
    # numbers.Real covers numpy's scalars. A boolean is refused: it is more often a slip than a reward.
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer past 1.8e308
            number = math.inf
        if math.isfinite(number):
            return number
    shown = repr(value)[:200]
    raise InvalidRewardError(f"{where} must be a finite number; got {shown}. Return a float or a Reward.")
