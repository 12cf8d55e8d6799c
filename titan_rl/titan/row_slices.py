"""Rows whose tokens are cut over context-parallel ranks, put together again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def gather_rows(values: torch.Tensor, index: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Whole rows from the slices of all ranks of a group. Collective.

    The gradient of a rank's values is that at their places, and is not added up over ranks: it is for a loss
    that every rank computes alike.

    Args:
        values: ``[B, t]``, this rank's. Gradient flows.
        index: ``[B, t]`` int64, their places in the rows; over all ranks each place occurs once.
        group: The ranks that share the rows.

    Returns:
        ``[B, T]`` with T = t times the number of ranks.
    """
    return _GatherRows.apply(values, index, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, values: torch.Tensor, index: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        whole = values.new_empty(values.shape[0], values.shape[1] * dist.get_world_size(group))
        return whole.scatter_(1, _all(index, group), _all(values, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyrefly: ignore[bad-override]
        (index,) = ctx.saved_tensors
        return grad.gather(1, index), None, None


def _all(slice_: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' slices side by side, ``[B, T]``."""
    slices = [torch.empty_like(slice_) for _ in range(dist.get_world_size(group))]
    dist.all_gather(slices, slice_.contiguous(), group=group)
    return torch.cat(slices, dim=1)
