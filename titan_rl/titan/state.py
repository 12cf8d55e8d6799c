"""The tensors of a TorchTitan decoder, module by module."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate ``(prefix, module)`` of the parts that are converted together: one layer, the embedding, ...

    TorchTitan's fused attention replicates its weights in ``state_dict()``; going part by part, only one
    layer is replicated at a time.
    """
    for name, child in model.named_children():
        if name == "layers":
            for index, layer in child.named_children():
                yield f"layers.{index}.", layer
        else:
            yield f"{name}.", child


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def full_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather the gradients, one tensor at a time. Collective over the ranks that shard the model.

    Args:
        model: A TorchTitan decoder, or some of its layers, after a backward pass.

    Yields:
        The parameter's name, without wrappers, and its full gradient; zeros where it has none.
    """
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        yield name.replace("_checkpoint_wrapped_module.", ""), whole.detach()
