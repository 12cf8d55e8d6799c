"""The experts of a mixture on a CPU with gloo.

TorchTitan computes all experts of a rank in one grouped matrix product, in bf16 whatever the model computes
in, which on a CPU would be neither fast nor exact. It sends tokens to the experts of other ranks with a
collective that gloo does not have. Routing, the order of tokens and their combination stay TorchTitan's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher


class CpuExperts(GroupedExperts):
    """TorchTitan's experts, without its grouped matrix product and its rounding to bf16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """The parent's."""

    def forward(
        self,
        x_RD: torch.Tensor,  # noqa: N803 (TorchTitan's names)
        num_tokens_per_expert_E: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """Compute ``w2(silu(w1 x) * w3 x)`` with each token's own expert.

        Args:
            x_RD: ``[R, D]``, the tokens that came to this rank's experts, sorted by expert.
            num_tokens_per_expert_E: ``[E]`` integers that add up to R, for the experts of this rank.

        Returns:
            ``[R, D]``.
        """
        gate, down, up = (
            (weight.to_local() if isinstance(weight, DTensor) else weight).to(x_RD.dtype).unbind()
            for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        # Experts without a token too: their gradient is then zero on every rank, and none is missing.
        return torch.cat(
            [
                F.linear(F.silu(F.linear(x, gate[e])) * F.linear(x, up[e]), down[e])
                for e, x in enumerate(x_RD.split(num_tokens_per_expert_E.tolist()))
            ]
        )


class GlooTokenDispatcher(AllToAllTokenDispatcher):
    """TorchTitan's dispatch of tokens to the ranks of their experts, over gloo's only all-to-all."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """The parent's."""

    def _token_count_exchange(
        self,
        num_local_tokens_per_expert_E: torch.Tensor,  # noqa: N803
        pg: dist.ProcessGroup,
        ep_size: int,
    ) -> torch.Tensor:
        counts = num_local_tokens_per_expert_E.view(ep_size, -1).contiguous()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=pg)
        return received

    def _dispatch_token_exchange(
        self,
        routed_input_ND: torch.Tensor,  # noqa: N803
        pg: dist.ProcessGroup,
        output_splits: list[int],
        input_splits: list[int],
    ) -> torch.Tensor:
        return exchange_rows(routed_input_ND, pg, received=output_splits, sent=input_splits)

    def _combine_token_exchange(
        self,
        routed_output_RD: torch.Tensor,  # noqa: N803
        pg: dist.ProcessGroup,
        input_splits: list[int],
        output_splits: list[int],
    ) -> torch.Tensor:
        return exchange_rows(routed_output_RD, pg, received=input_splits, sent=output_splits)


def exchange_rows(
    rows: torch.Tensor, group: dist.ProcessGroup, *, received: list[int], sent: list[int]
) -> torch.Tensor:
    """Send each rank of a group its part of some rows. Collective; the gradient goes the way back.

    Args:
        rows: ``[sum(sent), D]``, those for the first rank first. Gradient flows.
        group: The ranks.
        received: Rows that come from each rank.
        sent: Rows that go to each rank.

    Returns:
        ``[sum(received), D]``, those of the first rank first.
    """
    return _ExchangeRows.apply(rows, group, received, sent)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup, received: list[int], sent: list[int]
    ) -> torch.Tensor:
        ctx.way_back = group, sent, received
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # pyrefly: ignore[bad-override]
        group, received, sent = ctx.way_back
        return exchange_rows(grad, group, received=received, sent=sent), None, None, None


def use_cpu_experts(model_config: Any) -> None:
    """Swap the experts in a model's configuration and their dispatch for those of this module, in place.

    Args:
        model_config: TorchTitan's configuration tree of a model.
    """
    for layer in model_config.layers:
        moe = getattr(layer, "moe", None)
        routed = None if moe is None else moe.routed_experts
        # An architecture's own experts and dispatchers stay as they are.
        if routed is not None and type(routed.inner_experts) is GroupedExperts.Config:
            routed.inner_experts = _as(CpuExperts.Config, routed.inner_experts)
        if routed is not None and type(routed.token_dispatcher) is AllToAllTokenDispatcher.Config:
            routed.token_dispatcher = _as(GlooTokenDispatcher.Config, routed.token_dispatcher)


def _as(kind: Any, config: Any) -> Any:
    """The same configuration as one of a subclass."""
    return kind(**{field.name: getattr(config, field.name) for field in fields(config)})
