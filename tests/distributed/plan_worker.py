"""What test_plan_of_a_real_run.py measures: ``torchrun ... plan_worker.py CONFIG.toml DIRECTORY``.

An ordinary run of one iteration. Afterwards every rank writes ``rank<R>.json``: bytes of its tensors.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.distributed import activation_checkpoint

from titan_rl.config.entry import read_checked
from titan_rl.titan.models import local
from titan_rl.trainers import optimization
from titan_rl.trainers.configuration import configure


class Saved:
    """Bytes that one forward pass leaves for its backward pass: storages, each once, without the weights."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors: dict[int, torch.Tensor] = {}
        self._selected: list[Any] = []
        self.is_closed = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_closed:
            return tensor
        weights = {local(p).untyped_storage().data_ptr() for p in self._model.parameters()}
        weights |= {buffer.untyped_storage().data_ptr() for buffer in self._model.buffers()}
        key = local(tensor).untyped_storage().data_ptr()
        if key not in weights:
            self._tensors[key] = local(tensor)
        return tensor

    def contexts(self, policy: Any) -> Any:
        """Selective recomputation keeps its tensors in a context of its own."""
        pair = _CREATE(policy)
        self._selected.append(pair[0])
        return pair

    def num_bytes(self) -> int:
        kept = dict(self._tensors)
        for context in self._selected:
            for tensor in tensors_of(list(context.storage.values())):
                kept[tensor.untyped_storage().data_ptr()] = tensor
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


_CREATE = activation_checkpoint.create_selective_checkpoint_contexts


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield local(value)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    elif hasattr(value, "val"):
        yield from tensors_of(value.val)


def num_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(list(tensors)))


def optimizer_bytes(optimizers: Any) -> int:
    return sum(num_bytes(optimizer.state.values()) for optimizer in optimizers.optimizers)


def measure_activations(trainer: Any) -> list[int]:
    """Have every training forward pass measured, up to the log-probabilities; returns the list that fills."""
    measured: list[int] = []
    policy, original = trainer.policy, optimization.token_scores
    forward_backward = policy.forward_backward

    def one_by_one(batches: Any, loss: Any) -> list[Any]:
        metrics = []
        for number, rows in enumerate(batches):
            saved = Saved(policy.parts[0])

            def token_scores(*args: Any, saved: Saved = saved, **kwargs: Any) -> Any:
                scores = original(*args, **kwargs)
                measured.append(saved.num_bytes())
                saved.is_closed = True
                return scores

            optimization.token_scores = token_scores
            activation_checkpoint.create_selective_checkpoint_contexts = saved.contexts
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
                metrics += forward_backward([rows], lambda _, hidden, n=number: loss(n, hidden))
            activation_checkpoint.create_selective_checkpoint_contexts = _CREATE
        return metrics

    policy.forward_backward = one_by_one
    return measured


def run(config: str, directory: Path, overrides: list[str], rank: int) -> None:
    trainer: Any = configure(*read_checked(config, overrides)).build()
    activations = measure_activations(trainer)
    trainer.train()
    policy, critic = trainer.policy, trainer.critic
    reference = trainer.batch_maker._reference
    parameters = list(policy.parameters())
    result = {
        "parameters": num_bytes(parameters),
        "gradients": num_bytes(p.grad for p in parameters),
        "optimiser state": optimizer_bytes(trainer.optimizers),
        "reference": num_bytes(reference._model.parameters()),
        "critic": num_bytes(critic.model.parameters()),
        "critic optimiser state": optimizer_bytes(critic.optimizers),
        "buffers": sum(
            num_bytes(part.buffers())
            for model in (policy, critic.model, reference._model)
            for part in model.parts
        ),
        "activations": max(activations),
    }
    (directory / f"rank{rank}.json").write_text(json.dumps(result))
    trainer.close()
