"""Writing a stream of Hugging Face tensors into a whole model, with an account of what was written.

The receiving end of :class:`titan_rl.titan.weights.WeightStream`. Reading files is
:func:`titan_rl.titan.weights.load_hf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titan_rl.errors import GeneratorError
from titan_rl.titan.weights import TIED_HEAD, native_names, parts

_NATIVE_EMBEDDING = "tok_embeddings.weight"


class WeightSink:
    """Receives every weight of a model once, in any order; or some of them, and the others stay.

    Tensors are kept until their part of the model (a layer, the embedding, ...) is complete, because
    TorchTitan fuses projections and stacks experts; in the stream's order that is one part at a time.
    """

    def __init__(self, model: nn.Module, adapter: Any, *, is_partial: bool = False) -> None:
        """Prepare to write.

        Args:
            model: A TorchTitan decoder, not sharded.
            adapter: TorchTitan's state-dict adapter of the model. None: names are TorchTitan's own.
            is_partial: Only some weights will arrive, one part of the model after the other. What TorchTitan
                fuses must arrive together.
        """
        self._is_partial = is_partial
        self._arrived: set[str] = set()
        self._adapter = adapter
        self._is_tied = bool(getattr(model, "enable_weight_tying", False))
        self._modules = dict(parts(model))
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        self._part_of: dict[str, str] = {}
        for prefix, module in self._modules.items():
            shapes = {key: tuple(value.shape) for key, value in module.state_dict(prefix=prefix).items()}
            self._shapes[prefix] = shapes
            self._part_of |= dict.fromkeys(shapes, prefix)
        self._pending: dict[str, dict[str, torch.Tensor]] = {}
        self._seen: set[str] = set()
        self._written: set[str] = set()
        self._current = ""
        self._faults: list[str] = []

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Receive one tensor. Faults are reported by :meth:`finish`, so that the stream is read to its end.

        Args:
            name: Hugging Face name, or TorchTitan's own without an adapter.
            tensor: The full tensor, any dtype and device; it must keep its contents until :meth:`finish`.
        """
        if name in self._seen:
            self._faults.append(f"Every weight must arrive once; got {name} twice.")
            return
        self._seen.add(name)
        native = {name} if self._adapter is None else native_names(self._adapter, name)
        prefix = next((self._part_of[key] for key in native if key in self._part_of), None)
        if prefix is None:
            self._faults.append(f"Every weight must belong to the generator's model; got {name}.")
            return
        self._arrived |= native
        if prefix != self._current:
            self._flush(self._current, is_last=self._is_partial)
            self._current = prefix
        self._pending.setdefault(prefix, {})[name] = tensor

    def finish(self) -> tuple[str, ...]:
        """Write what is left, and account for everything.

        Returns:
            TorchTitan's names of the weights that nothing was written to, of those that were to arrive.

        Raises:
            GeneratorError: A name arrived twice, is unknown, or came with another shape than the model's.
        """
        for prefix in list(self._pending):
            self._flush(prefix, is_last=True)
        if self._faults:
            more = f" ({len(self._faults) - 1} more faults)" if len(self._faults) > 1 else ""
            raise GeneratorError(
                f"{self._faults[0]}{more} The trainer's model and the generator's must be the same one."
            )
        written = self._written
        if self._is_tied and written & {TIED_HEAD, _NATIVE_EMBEDDING}:
            written = written | {TIED_HEAD, _NATIVE_EMBEDDING}
        return tuple(sorted((self._arrived if self._is_partial else set(self._part_of)) - written))

    def _flush(self, prefix: str, *, is_last: bool = False) -> None:
        """Convert and write a part, if all of it is there or nothing more can come."""
        if prefix not in self._pending:
            return
        native = self._to_native(prefix, self._pending[prefix])
        if not is_last and set(native) != set(self._shapes[prefix]):
            return
        del self._pending[prefix]
        fitting = {key: tensor for key, tensor in native.items() if self._fits(prefix, key, tensor)}
        state = {key.removeprefix(prefix): tensor for key, tensor in fitting.items()}
        with torch.no_grad():
            self._modules[prefix].load_state_dict(state, strict=False)
        self._written |= set(fitting)

    def _to_native(self, prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._adapter is None:
            return dict(tensors)
        full = dict(tensors)
        placeholder = torch.empty(0)
        if self._is_tied:
            # The adapters insist on a head or an embedding in every bucket; the name alone satisfies them.
            full.setdefault(TIED_HEAD, placeholder)
        native = self._adapter.from_hf(full)
        wanted = self._shapes[prefix]
        return {key: tensor for key, tensor in native.items() if key in wanted and tensor is not placeholder}

    def _fits(self, prefix: str, key: str, tensor: torch.Tensor) -> bool:
        wanted = self._shapes[prefix][key]
        if tuple(tensor.shape) != wanted:
            self._faults.append(f"{key} must have shape {list(wanted)}; got {list(tensor.shape)}.")
            return False
        if self._is_tied and key in (TIED_HEAD, _NATIVE_EMBEDDING):
            others = {TIED_HEAD, _NATIVE_EMBEDDING} & self._written
            weight = self._modules[prefix].get_parameter("weight")
            if others and not torch.equal(weight, tensor.to(weight)):
                self._faults.append("The head must equal the embedding that it is tied to; got another one.")
                return False
        return True
