"""The experts of a mixture on a CPU: one matrix product per expert, in the model's own precision.

TorchTitan computes all experts of a rank in one grouped matrix product, in bf16 whatever the model computes
in. On a CPU that would be neither fast nor exact. Routing, dispatch and combination stay TorchTitan's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts


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


def use_cpu_experts(model_config: Any) -> None:
    """Swap the experts in a model's configuration for :class:`CpuExperts`, in place.

    Args:
        model_config: TorchTitan's configuration tree of a model.
    """
    for layer in model_config.layers:
        moe = getattr(layer, "moe", None)
        inner = None if moe is None else moe.routed_experts.inner_experts
        if type(inner) is GroupedExperts.Config:  # an architecture's own experts stay as they are
            moe.routed_experts.inner_experts = CpuExperts.Config(
                param_init=inner.param_init,
                sharding_config=inner.sharding_config,
                dim=inner.dim,
                hidden_dim=inner.hidden_dim,
                num_experts=inner.num_experts,
            )
