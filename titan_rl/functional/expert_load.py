"""How evenly routers spread tokens over experts, as numbers. Pure functions; who counts is elsewhere."""

from __future__ import annotations

import math

import torch


def expert_load(counts: torch.Tensor) -> dict[str, float]:
    """Statistics of the load of experts in several layers.

    With ``p[l, e]`` the share of layer l's assignments that went to expert e, so that ``sum_e p[l, e] = 1``:
    the largest and the smallest share over all layers and experts, and the mean over layers of the entropy
    ``-sum_e p ln p / ln E``, which is 1 for a perfectly even load and 0 when one expert gets everything.

    Args:
        counts: ``[L, E]``, 0 or more: how often a token of the layer was sent to the expert. Each row has
            a sum above 0. Without layers nothing is known.

    Returns:
        ``load_fraction_max``, ``load_fraction_min`` (both 1 / E when even) and ``load_entropy``, in [0, 1];
        empty without layers.

    Raises:
        ValueError: not two dimensions, or a layer without an assignment.

    >>> expert_load(torch.tensor([[1.0, 1.0], [4.0, 0.0]]))
    {'load_fraction_max': 1.0, 'load_fraction_min': 0.0, 'load_entropy': 0.5}
    """
    if counts.dim() != 2 or not bool((counts.sum(-1) > 0).all()):
        raise ValueError(f"counts must be [L, E] with a positive sum in every row; got {counts.tolist()}.")
    if not len(counts):
        return {}
    shares = counts.double() / counts.double().sum(-1, keepdim=True)
    most = math.log(counts.shape[1]) if counts.shape[1] > 1 else 1.0
    entropy = -torch.special.xlogy(shares, shares).sum(-1) / most
    return {
        "load_fraction_max": float(shares.max()),
        "load_fraction_min": float(shares.min()),
        "load_entropy": float(entropy.mean()),
    }
