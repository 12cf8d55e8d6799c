"""TorchTitan's configuration sections as TOML shows them, where its own dataclasses do not fit a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

ACTIVATION_CHECKPOINTING = {
    "selective": "torchtitan.distributed.activation_checkpoint:SelectiveAC",
    "full": "torchtitan.distributed.activation_checkpoint:FullAC",
    "memory_budget": "torchtitan.distributed.activation_checkpoint:MemoryBudgetAC",
}


@dataclass(kw_only=True, slots=True)
class OptimizerSection:
    """Table ``[optimizer]``: one parameter group for the whole model."""

    name: Literal["AdamW", "Adam"] = "AdamW"
    """Optimiser."""

    lr: Annotated[float, Gt(0)] = 1e-6
    """Peak learning rate."""

    betas: tuple[Annotated[float, Interval(ge=0, lt=1)], Annotated[float, Interval(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of the first and second moments."""

    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of the second moment."""

    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Decoupled weight decay for AdamW. 0 by default: in RL the reference is the anchor, not zero."""

    implementation: Literal["for-loop", "foreach", "fused", "fused_opt_states_bf16"] = "fused"
    """TorchTitan's optimiser implementation."""


def optimizer_from_section(section: OptimizerSection) -> OptimizersContainer.Config:
    """TorchTitan's optimiser configuration for ``[optimizer]``."""
    kwargs = {
        "lr": section.lr,
        "betas": section.betas,
        "eps": section.eps,
        "weight_decay": section.weight_decay,
    }
    group = ParamGroupConfig(pattern=".*", optimizer_name=section.name, optimizer_kwargs=kwargs)
    return OptimizersContainer.Config(param_groups=[group], implementation=section.implementation)


def section_from_optimizer(config: OptimizersContainer.Config) -> OptimizerSection:
    """``[optimizer]`` for a TorchTitan configuration with a single parameter group."""
    if not config.param_groups:
        return OptimizerSection(implementation=config.implementation)
    group = config.param_groups[0]
    known = {k: v for k, v in group.optimizer_kwargs.items() if k in ("lr", "betas", "eps", "weight_decay")}
    name: Any = group.optimizer_name
    return OptimizerSection(name=name, implementation=config.implementation, **known)
