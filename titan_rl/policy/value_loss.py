"""What a value loss of the critic sees, the loss itself, and what is logged of it.

The formula is in :mod:`titan_rl.functional.value`; the model and its steps in :mod:`titan_rl.policy.critic`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from titan_rl.functional.aggregate import token_mean
from titan_rl.functional.value import clipped_value_loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueInputs:
    """What a value loss sees of one micro-batch. Tensors are ``[B, T]``, aligned with the prediction.

    All three are in units of reward, or with ``normalise_values`` in standard deviations of the returns.

    Attributes:
        values: fp32 with grad; the value at ``t`` is that of the state in which the token at ``t + 1`` is
            sampled. 0 in the padding.
        returns: fp32, what the values are trained towards.
        old_values: fp32, the critic's at the start of the iteration.
        loss_mask: bool, True where a token is trained; everywhere else the loss must give no gradient.
        num_loss_tokens: Trained tokens of the step, over all ranks and micro-batches: the divisor of a mean.
    """

    values: torch.Tensor
    returns: torch.Tensor
    old_values: torch.Tensor
    loss_mask: torch.Tensor
    num_loss_tokens: int


ValueLoss = Callable[[ValueInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Gives this micro-batch's part of the loss (0-d, with grad), and its parts of metrics by name: each part is
a local sum over ``num_loss_tokens``, so that parts add up to a mean."""


class ClippedValueLoss:
    """Half the squared error, clipped around the old value (:func:`~titan_rl.functional.value`)."""

    def __init__(self, clip_range: float) -> None:
        """Bind the bound.

        Args:
            clip_range: How far a value may move, in the units of :class:`ValueInputs`; 0 for no bound.
        """
        self._clip = clip_range or None

    def __call__(self, inputs: ValueInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Mean over the trained tokens of the step."""
        mask, count = inputs.loss_mask, inputs.num_loss_tokens
        output = clipped_value_loss(inputs.values, inputs.old_values, inputs.returns, clip=self._clip)
        loss = token_mean(output.loss, mask, count)
        clipped = token_mean(output.is_clipped.float(), mask, count)
        return loss, {"loss": loss.detach(), "clip_fraction": clipped}


@torch.no_grad()
def value_statistics(inputs: ValueInputs) -> dict[str, torch.Tensor]:
    """Parts of means over the trained tokens, in float64 because squares will be subtracted.

    Args:
        inputs: Of one micro-batch.

    Returns:
        ``value``, ``return``, ``return_square`` and ``error_square``.
    """
    values, returns = inputs.values.double(), inputs.returns.double()
    named = {
        "value": values,
        "return": returns,
        "return_square": returns.square(),
        "error_square": (returns - values).square(),
    }
    return {n: token_mean(v, inputs.loss_mask, inputs.num_loss_tokens) for n, v in named.items()}
