"""Whether two steps are equal, and the table that says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titan_rl.tools.check.layouts import Case
from titan_rl.tools.check.step import Step

RELATIVE_BOUND, GRADIENT_FLOOR, LOSS_FLOOR = 1e-5, 1e-8, 5e-7
"""Equal: ``||a - b|| <= bound * ||b|| + floor``. A loss is a sum of terms of both signs, so that its rounding
is that of terms larger than itself: its floor is higher."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A step against the reference.

    Attributes:
        case: Which step.
        loss: Largest relative difference of a loss, beyond the floor.
        gradient: The same of the gradients.
        worst: The parameter with the largest difference.
        num_unequal: Gradients that are not equal.
    """

    case: Case
    loss: float
    gradient: float
    worst: str
    num_unequal: int

    @property
    def is_equal(self) -> bool:
        """Whether losses and gradients are within the bound."""
        return self.loss <= RELATIVE_BOUND and self.gradient <= RELATIVE_BOUND


def relative(difference: float, size: float, floor: float) -> float:
    """Difference beyond the floor against the size; infinite when either is not finite.

    >>> relative(3.0, 2.0, 1.0), relative(0.5, 0.0, 1.0), relative(2.0, 0.0, 1.0)
    (1.0, 0.0, inf)
    """
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    beyond = max(difference - floor, 0.0)
    if not beyond:
        return 0.0
    return beyond / size if size else math.inf


def compare(case: Case, got: Step, expected: Step) -> Comparison:
    """Compare losses and gradients.

    Args:
        case: That gave ``got``.
        got: A step.
        expected: The reference.

    Raises:
        ValueError: they do not have the same losses and parameters.
    """
    if got.losses.keys() != expected.losses.keys() or got.gradients.keys() != expected.gradients.keys():
        odd = sorted(set(got.gradients) ^ set(expected.gradients)) or sorted(got.losses)
        raise ValueError(f"{case.name} has other parameters or losses than the reference: {odd}.")
    losses = [relative(abs(got.losses[n] - e), abs(e), LOSS_FLOOR) for n, e in expected.losses.items()]
    gradients = {
        name: relative(_norm(got.gradients[name] - e), _norm(e), GRADIENT_FLOOR)
        for name, e in expected.gradients.items()
    }
    worst = max(gradients, key=gradients.__getitem__)
    unequal = sum(value > RELATIVE_BOUND for value in gradients.values())
    return Comparison(case, max(losses), gradients[worst], worst, unequal)


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


def render(comparisons: Sequence[Comparison], notes: Sequence[str]) -> str:
    """The table, what was not covered, and the verdict.

    Args:
        comparisons: Of all cases but the reference.
        notes: What was not covered and why.
    """
    width = max(len(c.case.name) for c in comparisons)
    lines = [f"{'':13}  {'largest relative difference of':{width}}  {'loss':>8}  {'gradient':>8}"]
    for c in comparisons:
        verdict = "equal" if c.is_equal else f"DIFFERS  {c.num_unequal} gradients, most in {c.worst}"
        numbers = f"{c.loss:8.1e}  {c.gradient:8.1e}"
        lines.append(f"{c.case.about:13}  {c.case.name:{width}}  {numbers}  {verdict}")
    lines += ["", "not covered", *(f"  - {note}" for note in notes), ""]
    unequal = sum(not c.is_equal for c in comparisons)
    if unequal:
        lines.append(f"{unequal} of {len(comparisons)} comparisons differ by more than {RELATIVE_BOUND:.0e}.")
    else:
        lines.append(f"all {len(comparisons)} comparisons are equal within {RELATIVE_BOUND:.0e}.")
    return "\n".join(lines)
