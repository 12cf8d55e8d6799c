"""A step of an algorithm: what it gave, how large the terms are that it added up, and when two are equal.

A loss whose advantages sum to zero is a small sum of large terms, and so is the gradient of a bias. The error
of such a sum has the size of its terms, not that of what remains of them: it is held against theirs.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import pytest
import torch

from tests.distributed import comparing
from titan_rl.algorithms.interfaces import LossInputs, LossOutput
from titan_rl.algorithms.policy_loss import PolicyLoss
from titan_rl.policy.value_loss import ValueInputs, ValueLoss

BIAS = "critic.lm_head.bias"


@dataclasses.dataclass
class Step:
    """What a step of one algorithm gave.

    Attributes:
        loss: Over all ranks.
        metrics: By name, over all ranks.
        gradients: Whole, by parameter; the critic's begin with ``critic.``.
        sizes: Of the loss and of the gradient of the critic's bias: the sums of their terms without their
            signs. This rank's: what is compared with must come from the only rank.
    """

    loss: float
    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]
    sizes: dict[str, float] = dataclasses.field(default_factory=dict)


def unequal(got: Step, expected: Step) -> list[str]:
    """Names of the gradients that are not equal, as :func:`tests.distributed.comparing.unequal` has it."""
    return comparing.unequal(got.gradients, expected.gradients, sizes=expected.sizes)


def has_equal_loss(got: Step, expected: Step) -> bool:
    """Whether the losses differ by at most 1e-6 of the terms of the one that is expected."""
    return abs(got.loss - expected.loss) <= comparing.OF_TERMS * expected.sizes["loss"]


def check_equal(got: Step, expected: Step) -> None:
    """Assert that gradients, losses and metrics are equal."""
    assert unequal(got, expected) == []
    assert has_equal_loss(got, expected), (got.loss, expected.loss, expected.sizes["loss"])
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)


class SizedLoss(PolicyLoss):
    """A policy loss that notes what its terms per token add up to without their signs.

    They are weighted and aggregated as in the loss itself.
    """

    def __init__(
        self, config: PolicyLoss.Config, *, sizes: defaultdict[str, float], compile_config: Any
    ) -> None:
        """Build the loss.

        Args:
            config: Of the loss.
            sizes: Its ``loss`` grows with every call.
            compile_config: As for :class:`PolicyLoss`.
        """
        super().__init__(config, compile_config=compile_config)
        self._sizes, self._terms = sizes, list[torch.Tensor]()
        self._unsigned = PolicyLoss(config)
        self._unsigned.aggregation = self._aggregate

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The loss of a micro-batch."""
        self._terms.clear()
        with torch.no_grad():
            self._unsigned(inputs)
        penalties = self.kl.coefficient * self.has_kl_in_loss, self.entropy.coefficient
        weights = [1.0, *filter(None, [*penalties, self.distillation.coefficient])]
        terms = zip(weights, self._terms, strict=True)
        self._sizes["loss"] += sum(weight * float(term) for weight, term in terms)
        return super().__call__(inputs)

    def _aggregate(self, inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
        self._terms.append(self.aggregation(inputs, values.abs()))
        return self._terms[-1]


class SizedValueLoss:
    """A critic's loss that notes what the gradients of its values add up to without their signs.

    Their sum with signs is the gradient of the bias that all values share.
    """

    def __init__(self, loss: ValueLoss, sizes: defaultdict[str, float]) -> None:
        """Wrap a loss.

        Args:
            loss: The critic's.
            sizes: Its ``critic.lm_head.bias`` grows with every backward pass.
        """
        self._loss, self._sizes = loss, sizes

    def __call__(self, inputs: ValueInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a micro-batch."""
        if inputs.values.requires_grad:
            inputs.values.register_hook(self._note)
        return self._loss(inputs)

    def _note(self, gradient: torch.Tensor) -> None:
        self._sizes[BIAS] += float(gradient.abs().sum())
