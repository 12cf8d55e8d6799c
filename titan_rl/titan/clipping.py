"""A look at the gradient norm between TorchTitan's clipping and its optimiser's step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torchtitan.distributed import utils as dist_utils


@contextmanager
def seen_norms(look: Callable[[float], None]) -> Generator[None]:
    """Have a function called with every gradient norm within the block.

    TorchTitan's training step has no place of its own for this.

    Args:
        look: Gets the norm before clipping, over all ranks. What it raises ends the training step before the
            optimiser's.
    """
    original = dist_utils.clip_grad_norm_

    def clip_grad_norm_(*arguments: Any, **named: Any) -> Any:
        norm = original(*arguments, **named)
        look(float(norm))
        return norm

    dist_utils.clip_grad_norm_ = clip_grad_norm_
    try:
        yield
    finally:
        dist_utils.clip_grad_norm_ = original
