"""How many tokens the routers of a mixture of experts sent to each expert in an optimiser step.

TorchTitan balances experts without an auxiliary loss: before each optimiser step a hook moves every router's
bias by the sign of each expert's load against the mean (Wang et al. 2024, arXiv 2408.15664). It counts every
token that passes while the model is in training mode. In RL that would count scoring passes, padding, and the
rows that fill up a step; counted here are the real tokens of the passes that are trained on, a token that
several samples share once for each, and TorchTitan's hook gets these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

from titan_rl.titan.state import local

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims


class RouterLoad:
    """Counters on the routers of a model's parts that this rank holds."""

    def __init__(self, parts: Sequence[nn.Module], dims: ParallelDims) -> None:
        """Hook into the routers.

        Args:
            parts: Of a decoder, parallelised, on their device.
            dims: The mesh that they are parallelised over.
        """
        self._dims = dims
        self._blocks = {f"layers.{name}": block for part in parts for name, block in _blocks(part)}
        self._counts = [torch.zeros_like(local(moe.tokens_per_expert_E)) for moe in self._mixtures()]
        # The tensor itself is kept, or its number could come to be another one's.
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._current: torch.Tensor | None = None
        for part in parts:
            part.register_forward_pre_hook(self._enter, with_kwargs=True)
        for counts, moe in zip(self._counts, self._mixtures(), strict=True):
            moe.router.register_forward_hook(self._counter(counts))

    def _mixtures(self) -> Iterator[Any]:
        return (block.moe for block in self._blocks.values())

    def expect(self, positions: torch.Tensor, weights: torch.Tensor) -> None:
        """Say what the tokens of a micro-batch count, before it is trained on. Of others none does.

        Args:
            positions: The tensor that the model is called with; it tells the micro-batches apart, also from
                the pass with which a pipeline first learns its shapes.
            weights: ``[B, t]``, the number of samples that a token is of; 0 in the padding.
        """
        self._weights[id(positions)] = positions, weights.float()

    def _enter(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._current = self._weights.get(id(kwargs.get("positions")), (None, None))[1]

    def _counter(self, counts: torch.Tensor) -> Any:
        def count(router: nn.Module, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            # Within a backward pass a checkpointed layer is computed a second time.
            is_again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
            if self._current is None or not torch.is_grad_enabled() or is_again:
                return
            experts = local(output[1].detach())  # [B, t, K]; t of this tensor-parallel rank's own tokens
            weights = self._own_tokens(self._current, experts.shape[1])
            counts.scatter_add_(0, experts.flatten(), weights[..., None].expand_as(experts).flatten())

        return count

    def _own_tokens(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """``[B, count]`` of ``[B, t]``: with expert parallelism tensor ranks share the tokens of a row."""
        if values.shape[1] == count:
            return values
        rank = self._dims.get_mesh("tp").get_local_rank()
        return values[:, rank * count : (rank + 1) * count]

    def take(self) -> dict[str, list[float]]:
        """Hand the counts to TorchTitan's hook, and start anew. Collective over the ranks of a stage.

        To be called between the last backward pass and the optimiser's step.

        Returns:
            By layer, the assignments to each expert over all ranks and micro-batches.
        """
        self._weights.clear()
        self._current = None
        if not self._counts:
            return {}
        total = torch.stack(self._counts)
        for counts, block in zip(self._counts, self._blocks.values(), strict=True):
            # TorchTitan takes a checkpointed layer's counts for twice what they are, and halves them.
            is_halved = getattr(block, "checkpoint_impl", None) is CheckpointImpl.NO_REENTRANT
            local(block.moe.tokens_per_expert_E).copy_(counts * (2 if is_halved else 1))
            counts.zero_()
        for group in self._groups():
            dist.all_reduce(total, group=group)
        return dict(zip(self._blocks, total.tolist(), strict=True))

    def _groups(self) -> Iterator[dist.ProcessGroup]:
        """Groups whose ranks count different tokens: tensor ranks do so with expert parallelism only."""
        names = ("loss", "tp") if self._dims.ep_enabled else ("loss",)
        for name in names:
            mesh = self._dims.get_optional_mesh(name)
            if mesh is not None:
                yield mesh.get_group()


def _blocks(part: nn.Module) -> Iterator[tuple[str, Any]]:
    layers: Any = part.get_submodule("layers")
    return ((name, block) for name, block in layers.items() if getattr(block, "moe_enabled", False))
