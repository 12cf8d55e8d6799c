"""The check that opens the functions of this package: nothing may broadcast by accident."""

from __future__ import annotations

import torch


def check_same_shape(**tensors: torch.Tensor) -> None:
    """Raise unless all tensors have one shape. ``[B]`` against ``[B, T]`` would broadcast without a word.

    Args:
        **tensors: By the name to use in the message; the first sets the shape.

    Raises:
        ValueError: Naming the first tensor that differs.

    >>> check_same_shape(ratio=torch.zeros(2, 3), advantages=torch.zeros(2, 1))
    Traceback (most recent call last):
    ...
    ValueError: advantages must have the shape of ratio, (2, 3); got (2, 1).
    """
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != reference.shape:
            expected, got = tuple(reference.shape), tuple(tensor.shape)
            raise ValueError(f"{name} must have the shape of {first}, {expected}; got {got}.")
