"""A named algorithm: its advantage and its loss, what they need, and which settings contradict them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from titan_rl.algorithms.interfaces import Advantage, Needs
from titan_rl.algorithms.loss import Loss
from titan_rl.algorithms.refill import RefillSection
from titan_rl.algorithms.shaping import ShapingSection
from titan_rl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmPreset:
    """The defaults that ``[algorithm] type = "<name>"`` puts under the tables of these names.

    Attributes:
        advantage: Config of an advantage.
        loss: Config of the loss.
        shaping: What is done to rewards and advantages beside it.
        refill: Whether groups that teach nothing are replaced.
    """

    advantage: object
    loss: Loss.Config
    shaping: ShapingSection = field(default_factory=ShapingSection)
    refill: RefillSection = field(default_factory=RefillSection)

    def sections(self) -> dict[str, object]:
        """The tables by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def derive_needs(advantage: Advantage, loss: Loss, *, steps_per_iteration: int) -> Needs:
    """What the whole composition asks of the rest of the system.

    Args:
        advantage: The built advantage.
        loss: The built loss.
        steps_per_iteration: K, at least 1.
    """
    return advantage.needs | loss.needs(steps_per_iteration=steps_per_iteration)


def check_composition(needs: Needs, *, group_size: int, advantage_type: str) -> None:
    """Find settings outside the algorithm's sections that contradict it.

    Args:
        needs: From :func:`derive_needs`.
        group_size: ``sampling.group_size``.
        advantage_type: ``advantage.type``, for the message.

    Raises:
        ConfigError: Naming both keys.

    >>> check_composition(Needs(smallest_group=2), group_size=1, advantage_type="group_normalized")
    Traceback (most recent call last):
    ...
    titan_rl.errors.ConfigError: sampling.group_size must be at least 2 with advantage.type = \
"group_normalized"; got 1. Set sampling.group_size = 8, or choose an advantage.type that needs no siblings.
    """
    if group_size < needs.smallest_group:
        raise ConfigError(
            "sampling.group_size",
            f'be at least {needs.smallest_group} with advantage.type = "{advantage_type}"',
            group_size,
            "Set sampling.group_size = 8, or choose an advantage.type that needs no siblings.",
        )
