"""What decides whether a gradient is applied: NaN, infinity, or a spike. The same on all ranks.

The norm is that of all parameters over all ranks, so that what is wrong on one is seen by all of them in the
same step, without another collective.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

import torch

HISTORY = 64
"""Norms of applied steps that the median is taken over."""
FEWEST = 4
"""So many have to be known before anything counts as a spike."""


class GradientGuard:
    """Judges gradient norms, and remembers those of the steps that were applied.

    A spike is ``norm > spike_factor * median`` of the last 64 norms above 0 of applied steps, if it is also
    above the norm that gradients are clipped to: what is smaller than that changes no more than usual.

    >>> guard = GradientGuard(spike_factor=100, max_norm=1.0)
    >>> for norm in (0.5, 0.6, 0.7, 0.5):
    ...     guard.applied(norm)
    >>> guard.fault(2.0), guard.fault(math.nan)
    (None, 'the gradient norm is nan')
    >>> guard.fault(5000.0)
    'the gradient norm is 5000, more than 100 (resilience.spike_factor) times 0.55, the median'
    """

    def __init__(self, *, spike_factor: float, max_norm: float) -> None:
        """Know of no step yet.

        Args:
            spike_factor: ``resilience.spike_factor``; 0: nothing is a spike.
            max_norm: That gradients are clipped to.
        """
        self._factor, self._max_norm = spike_factor, max_norm
        self._norms: deque[float] = deque(maxlen=HISTORY)

    def fault(self, grad_norm: float) -> str | None:
        """Why a gradient must not be applied, as a clause; None if it may.

        Args:
            grad_norm: Before clipping, over all ranks.
        """
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        if not self._factor or len(self._norms) < FEWEST or grad_norm <= self._max_norm:
            return None
        median = statistics.median(self._norms)
        if grad_norm <= self._factor * median:
            return None
        return (
            f"the gradient norm is {grad_norm:.4g}, more than {self._factor:g} (resilience.spike_factor) "
            f"times {median:.4g}, the median"
        )

    def applied(self, grad_norm: float) -> None:
        """Remember the norm of a step that was applied.

        Args:
            grad_norm: Before clipping. One of 0, where nothing was learnt, does not count.
        """
        if grad_norm > 0:
            self._norms.append(grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """The norms, oldest first, filled up with NaN: ``[64]`` float64."""
        padded = [*self._norms, *[math.nan] * (HISTORY - len(self._norms))]
        return {"norms": torch.tensor(padded, dtype=torch.float64)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them."""
        norms = state_dict["norms"].tolist()
        self._norms = deque((norm for norm in norms if not math.isnan(norm)), maxlen=HISTORY)
