"""Generators with a planted fault, chosen by ``[generator] type``; sound until a given version is pushed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from titan_rl.functional.checksum import tensor_checksum
from titan_rl.generation.local import LocalGenerator
from titan_rl.generation.protocol import GeneratorStatus
from titan_rl.generation.vllm import VllmGenerator
from titan_rl.types import Completion, WeightReceipt, WeightUpdate

LEFT_OUT = "model.layers.1.mlp.up_proj.weight"
TIED_HEAD = "lm_head.weight"


class _Faulty:
    """Mixed into a generator."""

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self.fault, self.from_version = config.fault, config.from_version
        self._confirmed: int | None = None  # what status() answers once the fault is to hide itself

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        if update.version < self.from_version:
            return super().load_weights(update)
        return getattr(self, f"_{self.fault}")(update)

    def status(self) -> GeneratorStatus:
        status = super().status()
        return (
            status if self._confirmed is None else dataclasses.replace(status, policy_version=self._confirmed)
        )

    def completions(self, timeout_seconds: float) -> Iterator[Completion]:
        for completion in super().completions(timeout_seconds):
            if self.fault == "older_completions" and self._policy_version == self.from_version:
                older = ((0, self.from_version - 1),)
                completion = dataclasses.replace(completion, policy_versions=older)
            yield completion

    def _older_completions(self, update: WeightUpdate) -> WeightReceipt:
        return super().load_weights(update)

    def _nothing_loaded(self, update: WeightUpdate) -> WeightReceipt:
        """Everything is acknowledged, nothing is loaded."""
        self._confirmed = update.version
        checksums = {name: tensor_checksum(tensor) for name, tensor in update.tensors}
        return WeightReceipt(update.version, checksums)

    def _push_not_made(self, update: WeightUpdate) -> WeightReceipt:
        """The stream is consumed and forgotten; the receipt is of the version before."""
        for _ in update.tensors:
            pass
        return WeightReceipt(update.version - 1, {})

    def _tensor_left_out(self, update: WeightUpdate) -> WeightReceipt:
        return self._load_without(update, LEFT_OUT)

    def _tensor_left_out_unnoticed(self, update: WeightUpdate) -> WeightReceipt:
        """As above, but the receipt says that it arrived."""
        return self._load_without(update, LEFT_OUT, forges_checksum=True)

    def _tied_head_left_out(self, update: WeightUpdate) -> WeightReceipt:
        return self._load_without(update, TIED_HEAD, forges_checksum=True)

    def _tied_head_left_out_unnoticed(self, update: WeightUpdate) -> WeightReceipt:
        """As above, and the generator does not look at what it wrote: only what it serves gives it away."""
        receipt = self._load_without(update, TIED_HEAD, forges_checksum=True)
        self._policy_version = update.version
        return dataclasses.replace(receipt, unwritten=())

    def _load_without(
        self, update: WeightUpdate, left_out: str, *, forges_checksum: bool = False
    ) -> WeightReceipt:
        dropped: dict[str, int] = {}

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in update.tensors:
                if name == left_out:
                    dropped[name] = tensor_checksum(tensor)
                else:
                    yield name, tensor

        receipt = super().load_weights(dataclasses.replace(update, tensors=others()))
        assert dropped, f"{left_out} was not in the stream"
        forged = dropped if forges_checksum else {}
        return dataclasses.replace(receipt, checksums={**receipt.checksums, **forged})

    def _perturbed(self, update: WeightUpdate) -> WeightReceipt:
        receipt = super().load_weights(update)
        self._perturb(1.0)
        return receipt

    def _perturbed_slightly(self, update: WeightUpdate) -> WeightReceipt:
        """By too little for the probe."""
        receipt = super().load_weights(update)
        self._perturb(1e-5)
        return receipt

    def _unseen_row_perturbed(self, update: WeightUpdate) -> WeightReceipt:
        """The embedding of a token that is not in the probe. In vLLM on a CPU the tied head is a copy."""
        receipt = super().load_weights(update)
        self._engine.collective_rpc(_perturb_last_row)
        return receipt

    def _perturb(self, amount: float) -> None:
        with torch.no_grad():
            self._model.model.layers["2"].feed_forward.w2.weight[3, 5] += amount  # one element of one matrix


def _perturb_last_row(worker: Any) -> None:
    with torch.no_grad():
        worker.model_runner.get_model().model.embed_tokens.weight[103] += 1.0


class FaultyLocal(_Faulty, LocalGenerator):
    @dataclass(kw_only=True, slots=True)
    class Config(LocalGenerator.Config):
        fault: str = ""
        from_version: int = 1


class FaultyVllm(_Faulty, VllmGenerator):
    @dataclass(kw_only=True, slots=True)
    class Config(VllmGenerator.Config):
        fault: str = ""
        from_version: int = 1
